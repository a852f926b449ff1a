/*
 * sbatch reads the options of the script and of the command line with the same getopt_long() and
 * does not tell a SPANK callback which of them it reads. The command line must override the script
 * as it does for every other option. Therefore this file looks at the arguments of the process:
 * while sbatch reads the command line, argument optind-1 is the current option. If the script has
 * the same option at the same index, the answer is "command line", which is also true.
 */
#define _GNU_SOURCE
#include "origin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
	const char *end = text + size;

	for (; index > 0 && text < end; index--)
		text += strnlen(text, (size_t)(end - text)) + 1;
	if (index != 0 || text >= end || !memchr(text, '\0', (size_t)(end - text)))
		return false;
	return is_option(text, name, value);
}

bool muri_on_command_line(const char *name, const char *value)
{
	FILE *file = fopen("/proc/self/cmdline", "re");
	char *text = NULL;
	size_t room = 0;
	ssize_t size;
	bool found = false;

	if (!file)
		return false;
	/* A delimiter that cannot occur in UTF-8 text makes getdelim() read the whole file. */
	size = getdelim(&text, &room, 0xff, file);
	if (size > 0)
		found = muri_argument_is(text, (size_t)size, optind - 1, name, value);
	free(text);
	fclose(file);
	return found;
}
