/* The option table, as Slurm wants it. */
#ifndef MURI_TABLE_H
#define MURI_TABLE_H

#include <slurm/spank.h>

#include "options.h"

/* What has been collected so far in this process. */
extern struct muri_options muri_given;

/* Register --muri and --no-muri once; calling again does nothing. */
int muri_register_options(spank_t spank);

#endif
