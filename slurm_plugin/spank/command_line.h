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

#endif
