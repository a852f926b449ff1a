/* What a user asks of Muri for one job: read from text, merged, and written as the job's mark. */
#ifndef MURI_REQUEST_H
#define MURI_REQUEST_H

#include "values.h"

struct muri_request {
	struct muri_value values[MURI_KEY_COUNT];	/* in the order of muri_keys */
};

void muri_request_clear(struct muri_request *request);

/*
 * Add the keys of `text` (NULL, "", or "key=value,key,…") to `into`. Repeating a key with the same
 * value is fine; giving a key another value than it already has is an error.
 * Returns 0, or -1 with the error filled in and `into` unchanged.
 */
int muri_request_parse(const char *text, struct muri_request *into, struct muri_error *error);

/* Lay the keys of `over` upon `base`; a key given in `over` wins. */
void muri_request_overlay(struct muri_request *base, const struct muri_request *over);

/*
 * Write the canonical text: "on", or the given keys in the order of muri_keys, with times in whole
 * seconds. Flags that say "no" are left out because "no" is the default.
 */
void muri_request_canonical(const struct muri_request *request, char out[MURI_CANONICAL_SIZE]);

/* True if the text could be canonical: it has a safe alphabet and a sane length. */
bool muri_is_canonical(const char *text);

#endif
