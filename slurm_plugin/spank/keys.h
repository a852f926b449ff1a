/* The keys of --muri: one table gives the parser, the help and the error messages. */
#ifndef MURI_KEYS_H
#define MURI_KEYS_H

#include "request.h"

struct muri_key {
	const char *name;
	const char *form;	/* as shown to a user, for example "model=NAME" */
	const char *meaning;
	bool value_optional;	/* a bare key means "yes" */
	int (*read)(const char *value, struct muri_request *into, struct muri_error *error);
};

extern const struct muri_key muri_keys[];	/* ends with a NULL name */

const struct muri_key *muri_find_key(const char *name);

/* The valid key that a mistyped name most resembles, or NULL if none is close. */
const char *muri_nearest_key(const char *name);

#endif
