/*
 * Facts that only the submitting process knows: the words of its command line and the Python of its environment.
 * They travel beside the mark as one word in a safe alphabet, read by muri.lua and muri.slurm_plugin.records.comment_tags:
 *
 *   1.ENVIRONMENT.LINE.PYTHON.ARGUMENTS
 *
 * ENVIRONMENT and LINE are digests in 16 hexadecimal digits; PYTHON is a path, and ARGUMENTS are the batch script's
 * words, each with its NUL, both in base64url without padding. ARGUMENTS is "~" where they would not fit.
 */
#ifndef MURI_FACTS_H
#define MURI_FACTS_H

#include <stddef.h>

enum {
	MURI_FACTS_SIZE = 4097,	/* longest text, with its NUL */
};

/*
 * Write the facts.
 *
 * `words` of `size` bytes are the command line; word number `script` is the batch script's name, if there is one.
 * Returns 0, or -1 where the command line makes no sense.
 */
int muri_facts(const char *words, size_t size, int script, char out[MURI_FACTS_SIZE]);

#endif
