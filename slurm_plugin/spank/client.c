/* sbatch, salloc and srun: from options to a mark on the job, which job_submit/muri.lua reads. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "muri.h"

enum { OPTION_MURI = 1, OPTION_NO_MURI = 2 };

/* The options of this process so far. */
static struct muri_options given;

/* Tell the user why an option is refused, if it is. Returns 0, or -1 for a refusal. */
static int report(const char *source, const char *refusal)
{
	if (refusal)
		slurm_error("muri: %s: %s", source, refusal);
	return refusal ? -1 : 0;
}

static enum muri_layer layer_of(const char *name, const char *value)
{
	/* srun and salloc have no script; only the allocator context of sbatch needs the question. */
	if (spank_context() != S_CTX_ALLOCATOR)
		return MURI_COMMAND_LINE;
	return muri_on_command_line(name, value) ? MURI_COMMAND_LINE : MURI_SCRIPT;
}

/*
 * True if Slurm calls back for a variable that it exported itself, not for an option that a user
 * wrote. For a heterogeneous job, sbatch passes the options of the previous component this way,
 * with the text "(null)" for an option without a value.
 */
static bool is_exported(const char *text, const char *variable)
{
	return text && text == getenv(variable);
}

static int on_muri(int value, const char *text, int remote)
{
	(void)value;
	/* In slurmstepd the mark is read from the environment; see spank.c. */
	if (remote || is_exported(text, MURI_EXPORTED))
		return 0;
	return report("--muri", muri_options_want(&given, layer_of("muri", text), text));
}

static int on_no_muri(int value, const char *text, int remote)
{
	(void)value;
	if (remote || is_exported(text, MURI_EXPORTED_NO))
		return 0;
	return report("--no-muri", muri_options_refuse(&given, layer_of("no-muri", NULL)));
}

static struct spank_option table[] = {
	{
		.name = "muri",
		.arginfo = "[key=value,...]",
		.usage = "let Muri share the job's GPUs with other training jobs. Keys: "
			 "model=NAME (name under which the training profile is kept), "
			 "batch-size=N (samples per iteration on one GPU), "
			 "duration=TIME (expected run time alone: minutes, HH:MM:SS, 90m, 2h), "
			 "checkpoint (the job writes checkpoints and may be stopped and resumed), "
			 "alone (profile the job but never group it with others), "
			 "accumulate=N (the script can split each batch into up to N parts (muri.accumulate)), "
			 "min-speed=X (least speed beside others, as a share of its speed alone), "
			 "opportunistic (the job only asks for what others leave over). "
			 "sbatch also reads SBATCH_MURI=1 or SBATCH_MURI=key=value,...",
		.has_arg = 2,
		.val = OPTION_MURI,
		.cb = on_muri,
	},
	{
		.name = "no-muri",
		.usage = "submit an ordinary job, whatever the script or SBATCH_MURI says",
		.has_arg = 0,
		.val = OPTION_NO_MURI,
		.cb = on_no_muri,
	},
};

int muri_register_options(spank_t spank)
{
	static bool done;

	if (done)
		return 0;
	done = true;
	muri_options_clear(&given);
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		spank_err_t failure = spank_option_register(spank, &table[i]);

		if (failure != ESPANK_SUCCESS) {
			slurm_error("muri: cannot register --%s: %s", table[i].name, spank_strerror(failure));
			return -1;
		}
	}
	return 0;
}

int muri_client_init(spank_t spank)
{
	/*
	 * Slurm exports the options of a job into its environment, and sbatch, salloc and srun take
	 * them up again from there. A job submitted from inside a Muri job must not be marked unasked,
	 * and a step must not be refused because its job's script and command line disagreed.
	 */
	unsetenv(MURI_EXPORTED);
	unsetenv(MURI_EXPORTED_NO);
	return muri_register_options(spank);
}

/* Read SBATCH_MURI, unless the command line says --no-muri. Returns 0, or -1 after telling the user. */
static int read_environment(void)
{
	const char *text = getenv("SBATCH_MURI");

	if (strcmp(program_invocation_short_name, "salloc") == 0)
		return 0;	/* sbatch alone reads SBATCH_ variables */
	if (!text || !*text || muri_says_no(text) || given.layer[MURI_COMMAND_LINE].refused)
		return 0;
	return report("SBATCH_MURI", muri_options_want(&given, MURI_ENVIRONMENT, text));
}

static bool is_sbatch(void)
{
	return strcmp(program_invocation_short_name, "sbatch") == 0;
}

/* Add the facts that only this process knows. A job without them is Muri's as well, but with unknown arguments. */
static void add_facts(spank_t spank)
{
	struct muri_words words = muri_command_line();
	char facts[MURI_FACTS_SIZE];

	/* sbatch has read its options: the next word is the batch script, whatever follows is its own. */
	if (is_sbatch() && words.text && muri_facts(words.text, words.size, optind, facts) == 0)
		spank_job_control_setenv(spank, MURI_FACTS_NAME, facts, 1);
	muri_words_free(&words);
}

/*
 * Whether sbatch only asks when Slurm would start the job: behind the gate that is never. Slurm tells neither plugins
 * nor slurmctld's job_submit that no job is to come of it, so the command line must.
 */
static bool only_tests(void)
{
	struct muri_words words = muri_command_line();
	bool found = is_sbatch() && muri_says(&words, optind, "--test-only");

	muri_words_free(&words);
	return found;
}

/* Set the texts for slurmctld's job_submit, and the job's MURI_JOB, which job_submit writes anew for a batch job. */
static int mark(spank_t spank, const char *texts)
{
	char text[MURI_TEXTS_SIZE];
	spank_err_t failure = spank_job_control_setenv(spank, MURI_OPTION_NAME, texts, 1);

	muri_options_mark(texts, text);
	if (failure == ESPANK_SUCCESS && setenv(MURI_CARRIER, text, 1) == 0)
		return 0;
	slurm_error("muri: cannot mark the job (%s); it is submitted as an ordinary job", spank_strerror(failure));
	return -1;
}

/* Remove variables inherited from an outer job. */
static void unmark(spank_t spank)
{
	spank_job_control_unsetenv(spank, MURI_OPTION_NAME);
	spank_job_control_unsetenv(spank, MURI_FACTS_NAME);
	unsetenv(MURI_OPTION_CARRIER);
	unsetenv(MURI_FACTS_CARRIER);
	unsetenv(MURI_CARRIER);
	unsetenv(MURI_JOB_VARIABLE);
}

static int apply(spank_t spank)
{
	char texts[MURI_TEXTS_SIZE];

	unmark(spank);
	if (!muri_options_result(&given, texts))
		return 0;
	if (only_tests()) {
		slurm_info("muri: tested as an ordinary job; Muri may start it at another time");
		spank_job_control_setenv(spank, MURI_TESTED_NAME, texts, 1);
		return 0;
	}
	add_facts(spank);
	return mark(spank, texts);
}

int muri_allocator_post_options(spank_t spank)
{
	if (read_environment()) {
		/*
		 * Slurm ignores the return value of an `optional` plugin here, and the job would be submitted in a
		 * way that the user did not ask for. Nothing has been sent yet: end the command. Not exit(): Slurm's
		 * exit handler would unload this code while it runs.
		 */
		slurm_error("muri: the job is not submitted");
		_exit(EXIT_FAILURE);
	}
	return apply(spank);
}

int muri_local_post_options(spank_t spank)
{
	return muri_options_given(&given) ? apply(spank) : 0;
}
