/*
 * sbatch reads the options of the script and of the command line with the same getopt_long() and
 * does not tell a SPANK callback which of them it reads. The command line must override the script
 * as it does for every other option. Therefore this file looks at the arguments of the process:
 * while sbatch reads the command line, argument optind-1 is the current option. If the script has
 * the same option at the same index, the answer is "command line", which is also true.
 */
#define _GNU_SOURCE
#include "origin.h"

#include <string.h>
#include <unistd.h>

#include "command_line.h"

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

bool muri_on_command_line(const char *name, const char *value)
{
	struct muri_words words = muri_command_line();
	bool found = words.text && muri_argument_is(words.text, words.size, optind - 1, name, value);

	muri_words_free(&words);
	return found;
}
