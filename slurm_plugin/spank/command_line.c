#define _GNU_SOURCE
#include "muri.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK = 4096 };

/* The rest of a file; the kernel does not say beforehand how long one of /proc is. */
static struct muri_words read_all(FILE *file)
{
	struct muri_words words = {NULL, 0};
	size_t got;

	do {
		char *larger = realloc(words.text, words.size + CHUNK);

		if (!larger)
			break;
		words.text = larger;
		got = fread(words.text + words.size, 1, CHUNK, file);
		words.size += got;
	} while (got == CHUNK);
	if (!feof(file))
		muri_words_free(&words);
	return words;
}

struct muri_words muri_command_line(void)
{
	FILE *file = fopen("/proc/self/cmdline", "re");
	struct muri_words words = {NULL, 0};

	if (file) {
		words = read_all(file);
		fclose(file);
	}
	return words;
}

void muri_words_free(struct muri_words *words)
{
	free(words->text);
	words->text = NULL;
	words->size = 0;
}

const char *muri_word(const char *text, size_t size, int index)
{
	const char *end = text + size;

	for (; index > 0 && text < end; index--)
		text += strnlen(text, (size_t)(end - text)) + 1;
	if (index != 0 || text >= end || !memchr(text, '\0', (size_t)(end - text)))
		return NULL;
	return text;
}

bool muri_says(const struct muri_words *words, int end, const char *option)
{
	const char *word = words->text;

	for (int index = 0; word && index < end; index++) {
		size_t left = words->size - (size_t)(word - words->text), length = strnlen(word, left);

		if (length == left)
			return false;
		if (length > strlen("--") && strncmp(option, word, length) == 0)
			return true;
		word += length + 1;
	}
	return false;
}

static bool is_option(const char *argument, const char *name, const char *value)
{
	size_t length;

	if (strncmp(argument, "--", 2) != 0)
		return false;
	argument += 2;
	length = strcspn(argument, "=");
	if (length == 0 || strncmp(argument, name, length) != 0)
		return false;
	if (argument[length] == '\0')
		return value == NULL;
	return value != NULL && strcmp(argument + length + 1, value) == 0;
}

bool muri_argument_is(const char *text, size_t size, int index, const char *name, const char *value)
{
	const char *argument = muri_word(text, size, index);

	return argument && is_option(argument, name, value);
}

/*
 * sbatch reads the options of the script and of the command line with the same getopt_long() and
 * does not tell a SPANK callback which of them it reads. The command line must override the script
 * as it does for every other option. Therefore this function looks at the arguments of the process:
 * while sbatch reads the command line, argument optind-1 is the current option. If the script has
 * the same option at the same index, the answer is "command line", which is also true.
 */
bool muri_on_command_line(const char *name, const char *value)
{
	struct muri_words words = muri_command_line();
	bool found = words.text && muri_argument_is(words.text, words.size, optind - 1, name, value);

	muri_words_free(&words);
	return found;
}
