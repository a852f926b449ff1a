/* The value of one key: read as the key's type says, compared and shown. */
#ifndef MURI_VALUES_H
#define MURI_VALUES_H

#include <stdbool.h>

#include "keys.h"

struct muri_value {
	bool given;			/* not given differs from "no" when layers are merged */
	long long number;		/* a count, seconds, thousandths, or a flag's 1 or 0 */
	char name[MURI_NAME_MAX + 1];	/* "" unless the type is MURI_NAME */
};

enum { MURI_SHOWN_SIZE = MURI_NAME_MAX + 24 };	/* a name or a number with its sign, unit and NUL */

struct muri_error {
	char text[512];
	bool list_keys;			/* the list of valid keys would help */
};

/* Format an error; always returns -1, so that `return muri_fail(…)` reads well. */
int muri_fail(struct muri_error *error, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* Read the text after "key=" into a cleared value. Returns 0, or -1 with the error filled in. */
int muri_read_value(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error);

/* True if two given values of one key say the same. */
bool muri_same_value(const struct muri_value *one, const struct muri_value *other);

/* Write a given value as the tag holds it: "resnet18", "64", "3600", "0.8", "1". */
void muri_write_value(const struct muri_key *key, const struct muri_value *value, char out[MURI_SHOWN_SIZE]);

/* Write a given value as a message shows it: "resnet18", "64", "3600s", "yes". */
void muri_show_value(const struct muri_key *key, const struct muri_value *value, char out[MURI_SHOWN_SIZE]);

/* 1 for 1/yes/on/true, 0 for 0/no/off/false, -1 for anything else; case does not matter. */
int muri_truth(const char *text);

#endif
