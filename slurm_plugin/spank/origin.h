/* Tells an option of the command line from one in the job script. */
#ifndef MURI_ORIGIN_H
#define MURI_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

/*
 * True if argument number `index` of the NUL-separated command line `text` is the option
 * --name, abbreviated as getopt_long allows, with exactly this value (NULL: no value).
 */
bool muri_argument_is(const char *text, size_t size, int index, const char *name, const char *value);

/* The same question about this process and the option getopt_long has just read. */
bool muri_on_command_line(const char *name, const char *value);

#endif
