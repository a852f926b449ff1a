/* The words of this process's command line, as the user gave them. */
#ifndef MURI_COMMAND_LINE_H
#define MURI_COMMAND_LINE_H

#include <stdbool.h>
#include <stddef.h>

struct muri_words {
	char *text;	/* the words, each with its NUL; NULL when they cannot be read */
	size_t size;	/* bytes in text */
};

/* Read /proc/self/cmdline to its end, whatever bytes it holds. Give the result to muri_words_free. */
struct muri_words muri_command_line(void);

void muri_words_free(struct muri_words *words);

/* Word number `index` of `size` bytes of words, or NULL where there is none or its end is missing. */
const char *muri_word(const char *text, size_t size, int index);

/* Whether one of the words up to number `end` says a long option; getopt_long takes its beginnings as well. */
bool muri_says(const struct muri_words *words, int end, const char *option);

/*
 * True if argument number `index` of the NUL-separated command line `text` is the option
 * --name, abbreviated as getopt_long allows, with exactly this value (NULL: no value).
 */
bool muri_argument_is(const char *text, size_t size, int index, const char *name, const char *value);

/* The same question about this process and the option getopt_long has just read. */
bool muri_on_command_line(const char *name, const char *value);

#endif
