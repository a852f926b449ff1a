/*
 * Prints what sbatch would send to slurmctld, without Slurm.
 *
 *   muri_try options cli:--muri=model=a script:--muri env:alone cli:--no-muri
 *   muri_try facts N WORD…
 *
 * `options` takes each option with the place where it is written. It prints the texts for job_submit and, in a second
 * line, the mark of a step, or "none" for an ordinary job; it refuses an option with status 2 and the reason. `facts`
 * prints the facts of the command line WORD… whose word number N (sbatch itself is 0) is the batch script.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "muri.h"

enum { REFUSED = 2, USAGE = 64 };

static int usage(void)
{
	fprintf(stderr, "usage: muri_try options {cli,env,script}:{--muri[=TEXT],--no-muri}… | muri_try facts N WORD…\n");
	return USAGE;
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
	const char *option = strchr(argument, ':'), *refusal;
	int layer = option ? layer_named(argument, (size_t)(option - argument)) : -1;

	if (layer < 0)
		return usage();
	option++;
	if (strcmp(option, "--no-muri") == 0)
		refusal = muri_options_refuse(options, layer);
	else if (strcmp(option, "--muri") == 0)
		refusal = muri_options_want(options, layer, NULL);
	else if (strncmp(option, "--muri=", 7) == 0)
		refusal = muri_options_want(options, layer, option + 7);
	else
		return usage();
	if (refusal)
		fprintf(stderr, "%s\n", refusal);
	return refusal ? REFUSED : 0;
}

static int show_options(int count, char *arguments[])
{
	char texts[MURI_TEXTS_SIZE], mark[MURI_TEXTS_SIZE];
	struct muri_options options = {0};

	for (int i = 0; i < count; i++) {
		int status = take(&options, arguments[i]);

		if (status)
			return status;
	}
	if (!muri_options_result(&options, texts)) {
		puts("none");
		return 0;
	}
	muri_options_mark(texts, mark);
	printf("%s\n%s\n", texts, muri_is_mark(mark) ? mark : "broken");
	return 0;
}

static int show_facts(int script)
{
	struct muri_words own = muri_command_line();
	const char *words = own.text ? muri_word(own.text, own.size, 3) : NULL;
	char out[MURI_FACTS_SIZE];
	int status = words ? 0 : usage();

	if (words)
		puts(muri_facts(words, own.size - (size_t)(words - own.text), script, out) ? "none" : out);
	muri_words_free(&own);
	return status;
}

int main(int count, char *arguments[])
{
	if (count > 1 && strcmp(arguments[1], "options") == 0)
		return show_options(count - 2, arguments + 2);
	if (count > 3 && strcmp(arguments[1], "facts") == 0)
		return show_facts(atoi(arguments[2]));
	return usage();
}
