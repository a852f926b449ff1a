/*
 * sbatch reads the options of the script and of the command line through the same getopt_long()
 * and tells a SPANK callback nothing of where it is. The command line must win over the script
 * as it does for every other option, so look at this process's own arguments: while the command
 * line is being read, argument optind-1 is the option in hand. If the script happens to have the
 * very same option at the very same place, the answer is "command line", and true all the same.
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
