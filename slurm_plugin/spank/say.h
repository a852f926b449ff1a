/* Every message of the plugin goes through here, so that each line starts with "muri: ". */
#ifndef MURI_SAY_H
#define MURI_SAY_H

#include "request.h"

/* Tell the user what is wrong with `source` ("--muri=…", "SBATCH_MURI=…"), with the keys if they help. */
void muri_say_refusal(const char *source, const char *text, const struct muri_error *error);

#endif
