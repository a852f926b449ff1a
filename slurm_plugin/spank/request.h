/* What a user asks of Muri for one job. No Slurm header is needed here. */
#ifndef MURI_REQUEST_H
#define MURI_REQUEST_H

#include <stdbool.h>
#include <stddef.h>

enum {
	MURI_MODEL_MAX = 64,		/* characters in a model name */
	MURI_CANONICAL_MAX = 160,	/* longest canonical text, with its NUL */
	MURI_ERROR_MAX = 512,
};

/* A flag the user may leave out: unset is not the same as "no" when layers are merged. */
enum muri_flag { MURI_UNSET = -1, MURI_NO = 0, MURI_YES = 1 };

struct muri_request {
	char model[MURI_MODEL_MAX + 1];	/* "" = not given */
	long long batch_size;		/* samples per iteration; 0 = not given */
	long long duration_s;		/* expected run time; 0 = not given */
	enum muri_flag checkpoint;
	enum muri_flag alone;
	long long accumulate;		/* most parts of a batch; 0 = not given */
};

struct muri_error {
	char text[MURI_ERROR_MAX];
	bool list_keys;			/* the list of valid keys would help */
};

void muri_request_clear(struct muri_request *request);

/*
 * Write the canonical text: "on", or the given keys in the order of the key table, with the
 * duration in whole seconds. Flags that say "no" are left out because "no" is the default.
 */
void muri_request_canonical(const struct muri_request *request, char *out, size_t size);

/* Lay the keys of `over` upon `base`; a key given in `over` wins. */
void muri_request_overlay(struct muri_request *base, const struct muri_request *over);

/* True if the text could have come from muri_request_canonical(): a safe alphabet, a sane length. */
bool muri_is_canonical(const char *text);

/* Format an error; always returns -1, so that `return muri_fail(…)` reads well. */
int muri_fail(struct muri_error *error, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

#endif
