/* The options that Slurm knows, what their callbacks have collected, and their refusals. */
#ifndef MURI_TABLE_H
#define MURI_TABLE_H

#include <slurm/spank.h>

#include "options.h"

/* What the options of this process have said so far. */
extern struct muri_options muri_given;

/*
 * Tell the user what is wrong with `source` ("--muri", "SBATCH_MURI"), with the list of keys where
 * it helps. Each line starts with "muri: ".
 */
void muri_say_refusal(const char *source, const char *text, const struct muri_error *error);

/* Register --muri and --no-muri once; calling again does nothing. */
int muri_register_options(spank_t spank);

#endif
