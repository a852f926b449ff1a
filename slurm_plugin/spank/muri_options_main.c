/*
 * The option parser without Slurm, for the tests and for trying an option by hand:
 *
 *   muri_options cli:--muri=model=a script:--muri env:alone cli:--no-muri
 *
 * Each argument is an option in the layer where it is written. The program prints the
 * canonical text of the mark, or "none" for an ordinary job; it refuses an option with status 2
 * and the reason.
 */
#include <stdio.h>
#include <string.h>

#include "options.h"

static int usage(const char *argument)
{
	fprintf(stderr, "muri_options: cannot read \"%s\"; write cli:, env: or script: and --muri[=…] or --no-muri\n",
		argument);
	return 64;
}

static int refusal(const struct muri_error *error)
{
	fprintf(stderr, "%s\n", error->text);
	for (int i = 0; error->list_keys && i < MURI_KEY_COUNT; i++)
		fprintf(stderr, "  %s: %s\n", muri_keys[i].form, muri_keys[i].help);
	return 2;
}

static int layer_named(const char *name, size_t length)
{
	static const char *const names[MURI_LAYERS] = {"script", "env", "cli"};

	for (int layer = 0; layer < MURI_LAYERS; layer++)
		if (strlen(names[layer]) == length && strncmp(names[layer], name, length) == 0)
			return layer;
	return -1;
}

static int take(struct muri_options *options, const char *argument)
{
	const char *option = strchr(argument, ':');
	struct muri_error error = {0};
	int layer = option ? layer_named(argument, (size_t)(option - argument)) : -1;
	int failure;

	if (layer < 0)
		return usage(argument);
	option++;
	if (strcmp(option, "--no-muri") == 0)
		failure = muri_options_refuse(options, layer, &error);
	else if (strcmp(option, "--muri") == 0)
		failure = muri_options_want(options, layer, NULL, &error);
	else if (strncmp(option, "--muri=", 7) == 0)
		failure = muri_options_want(options, layer, option + 7, &error);
	else
		return usage(argument);
	return failure ? refusal(&error) : 0;
}

int main(int count, char *arguments[])
{
	char canonical[MURI_CANONICAL_SIZE];
	struct muri_request request;
	struct muri_options options;

	muri_options_clear(&options);
	for (int i = 1; i < count; i++) {
		int status = take(&options, arguments[i]);

		if (status)
			return status;
	}
	if (!muri_options_result(&options, &request)) {
		puts("none");
		return 0;
	}
	muri_request_canonical(&request, canonical);
	puts(muri_is_canonical(canonical) ? canonical : "broken");
	return 0;
}
