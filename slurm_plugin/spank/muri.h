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
 *   job-N    a job that holds GPUs here, from its prolog to its epilog: uid, gpus (numbers as in SLURM_JOB_GPUS),
 *            sluid, and how programs learn of the GPUs: variables, mig. It proves that slurmd knows the plugin.
 *   grant-M  a run of job M may open what another job holds: pilot, uid, run (its restart count), gate (hold or
 *            license), cgroup (the directory of job M's processes; empty while no device has been opened for one).
 *   places-M which of these GPUs are whose of job M's steps, as long as each runs: by locks, the file is empty.
 *   lock     held while files are read and written, and while devices are opened for a grant. Once job-N is taken
 *            away under the lock, every grant from N with an open device has its cgroup.
 */

enum {
	MURI_GPUS_SIZE = 1024,	/* "0,1,2,…", with its NUL */
	MURI_CGROUP_SIZE = 4096,
	MURI_SLUID_SIZE = 32,
	MURI_VARIABLES_SIZE = 128,
	MURI_MIG_SIZE = 4096,
};

struct muri_job {
	uint32_t id;
	uid_t uid;
	char gpus[MURI_GPUS_SIZE];
	char sluid[MURI_SLUID_SIZE];	/* Slurm's name for the run, of which 26.05 names cgroups; "" before */
	char variables[MURI_VARIABLES_SIZE];	/* in which Slurm names them to programs: "CUDA_VISIBLE_DEVICES,…" */
	char mig[MURI_MIG_SIZE];	/* for CUDA, where they are parts of GPUs: "MIG-…,MIG-…" */
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

/* Milliseconds of a clock that only goes on. */
int64_t muri_now_ms(void);

/* Write a word into a file of a directory. */
bool muri_write_word(int directory, const char *name, const char *word);

/*
 * Wait for the lock, but not for ever: a holder that hangs must not stop others' jobs. Returns a descriptor, which holds it
 * until it is closed, or -1.
 */
int muri_node_lock(int node);

/* All of these return 0, or -1 with errno. Removing a missing file is fine. */
int muri_job_write(int node, const struct muri_job *job);
int muri_job_read(int node, uint32_t id, struct muri_job *job);
int muri_job_remove(int node, uint32_t id);
int muri_grant_write(int node, const struct muri_grant *grant);
int muri_grant_read(int node, uint32_t job, struct muri_grant *grant);
int muri_grant_remove(int node, uint32_t job);

/*
 * Take `count` of a job's `gpus` GPUs, beside each other in its list, that no other process has taken: from `first` on.
 * Returns a descriptor, which holds them until it is closed, or -1 where no such GPUs are left.
 */
int muri_take_places(int node, uint32_t job, size_t gpus, size_t count, size_t *first);

/* Write down the jobs that have a grant from this one, or from any with 0: at most `most`. Returns how many, or -1. */
ssize_t muri_grants_of(int node, uint32_t pilot, uint32_t *jobs, size_t most);

/* Read a whole text of decimal digits. */
bool muri_number(const char *text, uint32_t *number);

/* Whether a word of this length has the form of a SLUID, such as s3S9M8M911KB00. */
bool muri_is_sluid(const char *word, size_t length);

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
 * The prolog of a job that holds these GPUs, as in SLURM_JOB_GPUS: end what should have ended before it got them. An epilog may not have run to its
 * end, or may have started late: slurmd does not run one again, and Slurm does not wait for that of a node that is down.
 */
void muri_end_stale(int node, const char *name, uint32_t job, const char *gpus, const struct muri_end *end);

/* requeue.c: calls to slurmctld. */

/*
 * Put a member's run back into the queue because its pilot job has ended, and say so in the job's output. What Slurm
 * cannot requeue it cancels; what does not run any more, or is a later run, is left alone.
 * Returns false while slurmctld does not answer.
 */
bool muri_requeue(const struct muri_grant *grant);

/* Whether slurmctld says that a job has ended, its epilogs included; false while it does not answer. */
bool muri_has_ended(uint32_t job);

/* Put a member's run back into the queue because of `why`, which is said in its output unless it is NULL. */
bool muri_requeue_for(const struct muri_grant *grant, const char *why);

/* grant.c: the contents of a grant. Everything here is pure. */

enum {
	MURI_MOST_GPUS = 256,
	MURI_LARGEST_GPU = 99999,
};

enum muri_granted { MURI_NOT_GRANTED, MURI_GRANTED, MURI_GRANT_UNCLEAR };

/* Read the word muri-grant:PILOT of an AdminComment, which users cannot write. Unclear: not one job's number, once. */
enum muri_granted muri_granted_pilot(const char *comment, uint32_t *pilot);

/* Whether the first word muri-gate:… says that a license keeps the job waiting. */
bool muri_waits_for_license(const char *comment);

struct muri_gpus {
	size_t count;
	uint32_t number[MURI_MOST_GPUS];
};

/* Read "0,1,3". */
bool muri_read_gpus(const char *text, struct muri_gpus *gpus);

/* Some of a job's GPUs, by their place in its list. */
struct muri_part {
	size_t first, count;
};

/* Read "per-task:K". */
bool muri_per_task(const char *text, uint32_t *each);

/* The part of `count` GPUs that is a task's, by its number on the node; all with `each` 0. False: not so many. */
bool muri_part_of_task(size_t count, uint32_t each, uint32_t task, struct muri_part *part);

/* List a part's numbers with commas: the job's, or without `gpus` its places. */
bool muri_list_numbers(const struct muri_gpus *gpus, struct muri_part part, char *out, size_t size);

/* List a part of a list of words with commas. */
bool muri_list_words(const char *words, struct muri_part part, char *out, size_t size);

/* devices.c: opens for a task what another job can open. */

/*
 * Act in a mount namespace, in a child. In its job's own a user may have mounted anything over /dev and the cgroups, and
 * Slurm can be told to call plugins there. False: the child could not enter it, or did not end well.
 */
bool muri_act_in(int mounts, void (*act)(void *), void *context);

struct bpf_insn;

enum {
	MURI_MOST_CLOSED = 512,	/* devices that a cgroup may not open */
};

struct muri_device {
	char type;	/* c or b */
	dev_t number;
};

struct muri_devices {
	size_t count;
	struct muri_device *each;	/* in order */
};

/* Find the devices below a directory. False: some may be missing. Give them to muri_devices_free. */
bool muri_devices_below(const char *directory, struct muri_devices *devices);
void muri_devices_free(struct muri_devices *devices);

enum muri_cgroup_kind {
	MURI_CGROUP_NONE,
	MURI_CGROUP_OTHER,	/* of version 1 without the controller of devices */
	MURI_CGROUP_V1,	/* of version 1 with it */
	MURI_CGROUP_V2,
};

/* A line of /proc/PID/cgroup that has the job's cgroup. */
struct muri_cgroup_path {
	enum muri_cgroup_kind kind;
	size_t job_size;	/* characters of the path to the job's end */
	char controllers[256];
	char path[MURI_CGROUP_SIZE];
};

/* Find the line that decides about devices, or else another. */
bool muri_cgroup_path(const char *text, uint32_t job, struct muri_cgroup_path *found);

/* The next directory in which lines of mountinfo show the path; `mounts` moves behind its line. */
bool muri_cgroup_mounted(const char **mounts, const struct muri_cgroup_path *path, char *directory, size_t size);

/* A task's cgroup, as a directory. */
struct muri_cgroup {
	enum muri_cgroup_kind kind;
	size_t job_size;	/* characters of its job's directory */
	char leaf[MURI_CGROUP_SIZE];
};

/* Find the cgroup that Slurm has made for a process of the job: 1, 0 for none, or -1 when that cannot be said. */
int muri_cgroup_find(pid_t pid, uint32_t job, struct muri_cgroup *cgroup);

/* Whether Slurm limits which devices the job can open: 1, 0, or -1 when that cannot be said. */
int muri_constrains_devices(const struct muri_cgroup *cgroup);

/* Write the program of version 2 that refuses these devices; returns its instructions, 6 and 5 for each device. */
size_t muri_device_program(const struct muri_device *closed, size_t count, struct bpf_insn *out);

struct muri_opening {
	int node;	/* as muri_node_dir returns it, locked */
	const struct muri_cgroup *cgroup;
	const struct muri_job *pilot;
	size_t gpus;	/* GPUs of the pilot */
	struct muri_part part;	/* the task's */
};

/*
 * Open for a task, and for what pam_slurm_adopt puts into its job, the devices that are closed to it and that the
 * pilot's tasks can open. Both jobs are one user's.
 * `narrowed` is then whether only the task's part was opened; where GPUs have several files each, all of them are.
 * False: nothing was opened for good. That passes when the pilot's tasks have not started yet.
 */
bool muri_open_devices(const struct muri_opening *opening, bool *narrowed);

/* Close them again for what pam_slurm_adopt puts into the job with this cgroup: that can go on while the job ends. */
void muri_close_adopted(const char *job_name);

#endif
