/* The parts of the plugin that need no header of Slurm; spank.c has the rest. */
#ifndef MURI_H
#define MURI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* options.c: the texts of --muri and --no-muri from every place a user can write them; muri.lua gives them meaning. */

/* Where an option was written. A later layer overrides an earlier one, as for sbatch's own options. */
enum muri_layer { MURI_SCRIPT, MURI_ENVIRONMENT, MURI_COMMAND_LINE, MURI_LAYERS };

enum {
	MURI_TEXT_MAX = 1000,	/* characters in the texts of a layer */
	MURI_LAYER_SIZE = MURI_TEXT_MAX + sizeof(";c:"),
	MURI_TEXTS_SIZE = MURI_LAYERS * (MURI_LAYER_SIZE + 1),
};

/* Nothing is noted while all is zero. */
struct muri_options {
	struct {
		char texts[MURI_LAYER_SIZE];	/* "c:model=a;c:alone": a letter for the layer before each text */
		bool wanted;	/* --muri */
		bool refused;	/* --no-muri */
	} layer[MURI_LAYERS];
};

/* Note a --muri[=text] in a layer. Returns NULL, or the reason for which the user must change it. */
const char *muri_options_want(struct muri_options *options, enum muri_layer layer, const char *text);

/* Note a --no-muri in a layer. Returns NULL, or the reason for which the user must change it. */
const char *muri_options_refuse(struct muri_options *options, enum muri_layer layer);

/* True if the user wants Muri for the job; `out` then holds the texts of all layers, such as "s:model=a;c:". */
bool muri_options_result(const struct muri_options *options, char out[MURI_TEXTS_SIZE]);

/* True if --muri or --no-muri stands in any layer. */
bool muri_options_given(const struct muri_options *options);

/* Write texts as one, as a job finds them in MURI_JOB: "s:model=a;c:alone" as "model=a,alone", "c:" as "on". */
void muri_options_mark(const char *texts, char out[MURI_TEXTS_SIZE]);

/* True if the text has the alphabet and the length of a mark. */
bool muri_is_mark(const char *text);

/* True for 0, no, off and false, in any case. */
bool muri_says_no(const char *text);

/* facts.c: the words of this process's command line, as the user gave them, and the facts made of them. */

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

/*
 * True if argument number `index` of the NUL-separated command line `text` is the option
 * --name, abbreviated as getopt_long allows, with exactly this value (NULL: no value).
 */
bool muri_argument_is(const char *text, size_t size, int index, const char *name, const char *value);

/* The same question about this process and the option getopt_long has just read. */
bool muri_on_command_line(const char *name, const char *value);

/*
 * Facts that only the submitting process knows: the words of its command line and the Python of its environment. They
 * travel beside the mark as one word in a safe alphabet, read by muri.lua and muri.slurm_plugin.records.comment_tags:
 *
 *   1.ENVIRONMENT.LINE.PYTHON.ARGUMENTS
 *
 * ENVIRONMENT and LINE are digests in 16 hexadecimal digits; PYTHON is a path, and ARGUMENTS are the batch script's
 * words, each with its NUL, both in base64url without padding. ARGUMENTS is "~" where they would not fit.
 */

enum {
	MURI_FACTS_SIZE = 4097,	/* longest text, with its NUL */
};

/*
 * Write the facts.
 *
 * `words` of `size` bytes are the command line; word number `script` is the batch script's name, if there is one.
 * Returns 0, or -1 where the command line makes no sense.
 */
int muri_facts(const char *words, size_t size, int script, char out[MURI_FACTS_SIZE]);

/* run_dir.c: the directory in which the jobs of one user and their group's runtime meet on a node. */

#define MURI_RUN_PARENT "/run"

/*
 * Make `parent`/muri, which all users may enter and only this process's user may write, and in it a directory named
 * like the user's id that only that user can enter. No link is followed, and nothing that belongs to another user is
 * touched. Calling it again, also at the same time, is fine.
 * Returns 0, or -1 with a sentence in `error`.
 */
int muri_make_run_dir(const char *parent, uid_t uid, gid_t gid, char *error, size_t error_size);

/*
 * node.c: what root notes about jobs on this node, in /run/muri/node/NODENAME. Each file has a line key=value for each
 * fact; unknown keys are left alone.
 *
 *   job-N    a job that holds GPUs here, from its prolog to its epilog: uid, gpus (numbers as in SLURM_JOB_GPUS). It
 *            proves that slurmd knows the plugin.
 *   grant-M  a run of job M may open what another job holds: pilot, uid, run (its restart count), gate (hold or
 *            license), cgroup (the directory of job M's processes; empty while no device has been opened for one).
 *   lock     held while files are read and written, and while devices are opened for a grant. Once job-N is taken
 *            away under the lock, every grant from N with an open device has its cgroup.
 */

enum {
	MURI_GPUS_SIZE = 1024,	/* "0,1,2,…", with its NUL */
	MURI_CGROUP_SIZE = 4096,
};

struct muri_job {
	uint32_t id;
	uid_t uid;
	char gpus[MURI_GPUS_SIZE];
};

struct muri_grant {
	uint32_t job;	/* the member */
	uint32_t pilot;
	uid_t uid;
	uint32_t run;	/* how often Slurm had requeued the job: a later run is not granted anything */
	bool license;	/* it waits behind a license, not a hold */
	char cgroup[MURI_CGROUP_SIZE];
};

/*
 * Open `parent`/muri/node/NODE, made where it is missing. `parent` is MURI_RUN_PARENT, `node` what slurmd says:
 * getenv("SLURMD_NODENAME") in slurmstepd and in prolog and epilog, never the job's environment (spank_getenv).
 * No link is followed, and nothing that belongs to another user is used.
 * Returns a descriptor, or -1 with a sentence in `error`.
 */
int muri_node_dir(const char *parent, const char *node, char *error, size_t error_size);

/* Wait for the lock. Returns a descriptor, which holds it until it is closed, or -1. */
int muri_node_lock(int node);

/* All of these return 0, or -1 with errno. Removing a missing file is fine. */
int muri_job_write(int node, const struct muri_job *job);
int muri_job_read(int node, uint32_t id, struct muri_job *job);
int muri_job_remove(int node, uint32_t id);
int muri_grant_write(int node, const struct muri_grant *grant);
int muri_grant_read(int node, uint32_t job, struct muri_grant *grant);
int muri_grant_remove(int node, uint32_t job);

/* Write down the jobs that have a grant from this one, or from any with 0: at most `most`. Returns how many, or -1. */
ssize_t muri_grants_of(int node, uint32_t pilot, uint32_t *jobs, size_t most);

/* Read a whole text of decimal digits. */
bool muri_number(const char *text, uint32_t *number);

/* processes.c: a job's processes on this node. */

/*
 * Count the processes of a grant's job on this node, `node`, and kill them if wanted: all that is in the job's cgroup and
 * below it but Slurm's own, or without a cgroup all tasks of the job whose environment tells so. Those that are being
 * killed count; call it again until it returns 0.
 */
size_t muri_processes(const struct muri_grant *grant, const char *node, bool killing);

/* end.c: the end of a job on this node. */

/* How a job's end reaches Slurm, and how long it waits. */
struct muri_end {
	/* Put a member's run back into the queue; false while slurmctld does not answer. */
	bool (*requeue)(const struct muri_grant *grant);
	/* Whether slurmctld says that a job has ended, its epilogs included. */
	bool (*has_ended)(uint32_t job);
	void (*say)(const char *text);
	int ask_ms;	/* for slurmctld to answer */
	int grace_ms;	/* for a requeued job to end by itself */
	int hurry_ms;	/* for both, once slurmd has gone */
};

/*
 * The epilog of a job on the node `name`, whose directory is `node`: remove the notes of its GPUs and of its own grant, and
 * end all jobs with a grant from it. No process that may have one of its GPUs open is left then.
 */
void muri_end_job(int node, const char *name, uint32_t job, const struct muri_end *end);

/*
 * The prolog of a job that holds GPUs: end what should have ended before it got them. An epilog may not have run to its
 * end, or may have started late: slurmd does not run one again, and Slurm does not wait for that of a node that is down.
 */
void muri_end_stale(int node, const char *name, uint32_t job, const struct muri_end *end);

/* requeue.c: calls to slurmctld. */

/*
 * Put a member's run back into the queue because its pilot job has ended, and say so in the job's output. What Slurm
 * cannot requeue it cancels; what does not run any more, or is a later run, is left alone.
 * Returns false while slurmctld does not answer.
 */
bool muri_requeue(const struct muri_grant *grant);

/* Whether slurmctld says that a job has ended, its epilogs included; false while it does not answer. */
bool muri_has_ended(uint32_t job);

#endif
