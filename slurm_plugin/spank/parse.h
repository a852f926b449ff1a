/* Reads the text after --muri=. */
#ifndef MURI_PARSE_H
#define MURI_PARSE_H

#include "request.h"

/*
 * Add the keys of `text` (NULL, "", or "key=value,key,…") to `into`. Saying the same twice is
 * fine; giving a key another value than it already has is an error.
 * Returns 0, or -1 with the error filled in and `into` unchanged.
 */
int muri_parse(const char *text, struct muri_request *into, struct muri_error *error);

#endif
