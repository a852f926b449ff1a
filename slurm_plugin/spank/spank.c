/*
 * Entry points of the SPANK plugin: sbatch --muri, salloc --muri, srun --muri. These put a mark on the job, which
 * job_submit/muri.lua reads.
 * The plugin never fails a job. It refuses only a mistake in the user's own option, at submit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "member.h"
#include "muri.h"

#define PUBLIC __attribute__((visibility("default")))

#pragma GCC visibility push(default)
SPANK_PLUGIN(muri, 1)
#pragma GCC visibility pop

/*
 * Entries of the job control environment, read by job_submit/muri.lua: the option's texts, those of a job that is only
 * tested, and the facts. Slurm exports an entry NAME as SLURM_SPANK_NAME, and keeps SLURM_* variables whatever --export
 * says.
 */
#define MURI_OPTION_NAME "MURI_OPTION"
#define MURI_OPTION_CARRIER "SLURM_SPANK_MURI_OPTION"
#define MURI_TESTED_NAME "MURI_TESTED"
#define MURI_FACTS_NAME "MURI_FACTS"
#define MURI_FACTS_CARRIER "SLURM_SPANK_MURI_FACTS"

/* The mark travels in this variable, and the job finds it in the other. */
#define MURI_CARRIER "SLURM_SPANK_MURI_JOB"
#define MURI_JOB_VARIABLE "MURI_JOB"

/* In the environment of a member: its pilot job, and what each task of a step sees (cli_filter/muri.lua). */
#define MURI_PILOT_VARIABLE "MURI_PILOT"
#define MURI_STEP_GPUS_VARIABLE "MURI_STEP_GPUS"

/* The variables in which Slurm exports the options of a job: a fixed prefix, plugin, option. */
#define MURI_EXPORTED "SLURM_SPANK__SLURM_SPANK_OPTION_muri_muri"
#define MURI_EXPORTED_NO "SLURM_SPANK__SLURM_SPANK_OPTION_muri_no_muri"

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
	/* In slurmstepd the mark is read from the environment. */
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

static int register_options(spank_t spank)
{
	static bool done;

	if (done)
		return 0;
	done = true;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		spank_err_t failure = spank_option_register(spank, &table[i]);

		if (failure != ESPANK_SUCCESS) {
			slurm_error("muri: cannot register --%s: %s", table[i].name, spank_strerror(failure));
			return -1;
		}
	}
	return 0;
}

/*
 * Keep what belongs to a member's step to it. A member may submit jobs that are not members. A step's own
 * part of the GPUs is not that of the steps it starts. And srun would ask slurmctld for what is counted by the GPU,
 * which it refuses in a step without GPUs of Slurm's; cli_filter/muri.lua can replace options of srun, but not unset them.
 */
static void forget_member(void)
{
	static const char *const counted_by_gpu[] = {
		"SLURM_CPUS_PER_GPU", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES",
	};
	bool is_step = spank_context() == S_CTX_LOCAL && getenv("SLURM_JOB_ID");

	unsetenv(MURI_STEP_GPUS_VARIABLE);
	if (!is_step)
		unsetenv(MURI_PILOT_VARIABLE);
	for (size_t i = 0; getenv(MURI_PILOT_VARIABLE) && i < sizeof(counted_by_gpu) / sizeof(counted_by_gpu[0]); i++)
		unsetenv(counted_by_gpu[i]);

	/* Where Muri gave a job other CPUs, Slurm up to 25.05 leaves their old number here, and srun refuses to choose. */
	const char *cpus = getenv("SLURM_CPUS_PER_TASK"), *old = getenv("SLURM_TRES_PER_TASK");

	if (is_step && getenv(MURI_JOB_VARIABLE) && cpus && old && strncmp(old, "cpu", 3) == 0 && old[3] &&
	    !strchr(old, ',') && strcmp(old + 4, cpus) != 0)
		unsetenv("SLURM_TRES_PER_TASK");
}

static int client_init(spank_t spank)
{
	forget_member();
	/*
	 * Slurm exports the options of a job into its environment, and sbatch, salloc and srun take
	 * them up again from there. A job submitted from inside a Muri job must not be marked unasked,
	 * and a step must not be refused because its job's script and command line disagreed.
	 */
	unsetenv(MURI_EXPORTED);
	unsetenv(MURI_EXPORTED_NO);
	return register_options(spank);
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
static int mark_job(spank_t spank, const char *texts)
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
static void unmark_job(spank_t spank)
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

	unmark_job(spank);
	if (!muri_options_result(&given, texts))
		return 0;
	if (only_tests()) {
		slurm_info("muri: tested as an ordinary job; Muri may start it at another time");
		spank_job_control_setenv(spank, MURI_TESTED_NAME, texts, 1);
		return 0;
	}
	add_facts(spank);
	return mark_job(spank, texts);
}

static int allocator_post_options(spank_t spank)
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

static void check_arguments(int count, char *arguments[])
{
	for (int i = 0; i < count; i++)
		slurm_error("muri: plugstack.conf: unknown argument \"%s\" ignored; the plugin takes none", arguments[i]);
}

/* Without the directory members of a group meet in /tmp, so a failure is not the job's. */
static void make_run_dir(spank_t spank)
{
	char error[256];
	uid_t uid;
	gid_t gid;

	if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_GID, &gid) != ESPANK_SUCCESS)
		return;
	if (muri_make_run_dir(MURI_RUN_PARENT, uid, gid, error, sizeof(error)))
		slurm_info("muri: %s in %s", error, MURI_RUN_PARENT);
}

static int remote_init(spank_t spank)
{
	/* As root, and for every job: a pilot job has no mark, and a job's environment is its user's to write. */
	make_run_dir(spank);
	return register_options(spank);
}

static int remote_user_init(spank_t spank)
{
	char mark[MURI_TEXTS_SIZE];

	if (spank_getenv(spank, MURI_CARRIER, mark, sizeof(mark)) != ESPANK_SUCCESS)
		return 0;
	if (!muri_is_mark(mark)) {
		slurm_info("muri: %s does not hold a mark of Muri; ignored", MURI_CARRIER);
		return 0;
	}
	if (spank_setenv(spank, MURI_JOB_VARIABLE, mark, 1) != ESPANK_SUCCESS)
		slurm_info("muri: cannot set %s in the job's environment", MURI_JOB_VARIABLE);
	return 0;
}

PUBLIC int slurm_spank_init(spank_t spank, int count, char *arguments[])
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
		check_arguments(count, arguments);
		return client_init(spank);
	case S_CTX_REMOTE:
		return remote_init(spank);
	default:
		return 0;
	}
}

PUBLIC int slurm_spank_init_post_opt(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		return allocator_post_options(spank);
	case S_CTX_LOCAL:
		/* Without an option of its own a step keeps its job's mark. */
		return muri_options_given(&given) ? apply(spank) : 0;
	case S_CTX_REMOTE:
		muri_member_init(spank);
		return 0;
	default:
		return 0;
	}
}

PUBLIC int slurm_spank_user_init(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	return spank_context() == S_CTX_REMOTE ? remote_user_init(spank) : 0;
}

static void say(const char *text)
{
	slurm_info("%s", text);
}

/* Epilogs often have a minute: with slurmctld away this takes half of it. */
static const struct muri_end end = {
	.requeue = muri_requeue,
	.has_ended = muri_has_ended,
	.say = say,
	.ask_ms = 20000,
	.grace_ms = 10000,
	.hurry_ms = 1000,
};

static void at_end(spank_t spank, void (*act)(int, const char *, uint32_t, const struct muri_end *))
{
	const char *name = getenv("SLURMD_NODENAME");
	char error[256];
	uint32_t job;
	int node;

	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS)
		return;
	node = muri_node_dir(MURI_RUN_PARENT, name, error, sizeof(error));
	if (node < 0) {
		slurm_error("muri: %s", error);
		return;
	}
	act(node, name, job, &end);
	close(node);
}

/* End what is noted of the job, in a prolog that of an earlier run whose epilog was cut off. Most jobs have no note. */
static void end_noted(int node, const char *name, uint32_t job, const struct muri_end *ending)
{
	struct muri_grant grant;
	struct muri_job noted;

	if (muri_job_read(node, job, &noted) == 0 || errno != ENOENT || muri_grant_read(node, job, &grant) == 0 ||
	    errno != ENOENT)
		muri_end_job(node, name, job, ending);
}

static void end_stale(int node, const char *name, uint32_t job, const struct muri_end *ending)
{
	const char *gpus = getenv("SLURM_JOB_GPUS");

	if (gpus)
		muri_end_stale(node, name, job, gpus, ending);
}

PUBLIC int slurm_spank_job_prolog(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	at_end(spank, end_noted);
	at_end(spank, end_stale);
	muri_member_prolog(spank);
	return 0;
}

PUBLIC int slurm_spank_job_epilog(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	at_end(spank, end_noted);
	return 0;
}

PUBLIC int slurm_spank_task_post_fork(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	if (spank_context() == S_CTX_REMOTE)
		muri_member_forked(spank);
	return 0;
}

PUBLIC int slurm_spank_task_init(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	if (spank_context() == S_CTX_REMOTE)
		muri_member_task(spank);
	return 0;
}

PUBLIC int slurm_spank_task_exit(spank_t spank, int count, char *arguments[])
{
	(void)spank;
	(void)count;
	(void)arguments;
	if (spank_context() == S_CTX_REMOTE)
		muri_member_task_ended();
	return 0;
}

PUBLIC int slurm_spank_exit(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	if (spank_context() == S_CTX_REMOTE)
		muri_member_exit(spank);
	return 0;
}
