/* sbatch, salloc and srun: from options to a mark on the job. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command_line.h"
#include "context.h"
#include "facts.h"
#include "table.h"

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
	struct muri_error error;

	if (strcmp(program_invocation_short_name, "salloc") == 0)
		return 0;	/* sbatch alone reads SBATCH_ variables */
	if (!text || !*text || muri_truth(text) == 0 || muri_given.layer[MURI_COMMAND_LINE].refused)
		return 0;
	if (muri_options_want(&muri_given, MURI_ENVIRONMENT, text, &error) == 0)
		return 0;
	muri_say_refusal("SBATCH_MURI", text, &error);
	return -1;
}

static bool is_sbatch(void)
{
	return strcmp(program_invocation_short_name, "sbatch") == 0;
}

/* Add what only this process knows. A job without it is Muri's as well, but its arguments may not be known. */
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

static int mark(spank_t spank, const char *canonical)
{
	spank_err_t failure = spank_job_control_setenv(spank, MURI_CONTROL_NAME, canonical, 1);

	if (failure == ESPANK_SUCCESS && setenv(MURI_CARRIER, canonical, 1) == 0)
		return 0;
	slurm_error("muri: cannot mark the job (%s); it is submitted as an ordinary job", spank_strerror(failure));
	return -1;
}

static void unmark(spank_t spank)
{
	spank_job_control_unsetenv(spank, MURI_CONTROL_NAME);
	unsetenv(MURI_CARRIER);
	unsetenv(MURI_JOB_VARIABLE);
}

/* Those of an outer job say nothing of this one. */
static void forget_facts(spank_t spank)
{
	spank_job_control_unsetenv(spank, MURI_FACTS_NAME);
	unsetenv(MURI_FACTS_CARRIER);
}

static int apply(spank_t spank)
{
	struct muri_request request;
	char canonical[MURI_CANONICAL_SIZE];

	forget_facts(spank);
	if (!muri_options_result(&muri_given, &request)) {
		unmark(spank);
		return 0;
	}
	if (only_tests()) {
		slurm_info("muri: tested as an ordinary job; Muri may start it at another time");
		unmark(spank);
		return 0;
	}
	muri_request_canonical(&request, canonical);
	add_facts(spank);
	return mark(spank, canonical);
}

int muri_allocator_post_options(spank_t spank)
{
	if (read_environment()) {
		/*
		 * Slurm ignores what an `optional` plugin returns here, and the job would be submitted
		 * as something the user did not ask for. Nothing has been sent yet: end the command.
		 * Not exit(): Slurm's exit handler would unload this code while it runs.
		 */
		slurm_error("muri: the job is not submitted");
		_exit(EXIT_FAILURE);
	}
	return apply(spank);
}

int muri_local_post_options(spank_t spank)
{
	return muri_options_given(&muri_given) ? apply(spank) : 0;
}
