/*
 * A job that shares another's GPUs: root on the node opens them for it.
 *
 * A step's environment is its user's. It only says when to ask. Grants are in the job's AdminComment, which users
 * cannot write, and in the notes of node.c.
 */
#define _GNU_SOURCE
#define SLURM_BACKWARD_COMPAT	/* from 26.05 on jobs have numbers only with this */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "member.h"
#include "muri.h"

/* How a step learns that its job may be Muri's, and of the GPUs that each of its tasks asks for. */
#define MARK "MURI_JOB"
#define MARK_CARRIER "SLURM_SPANK_MURI_JOB"
#define STEP_GPUS "MURI_STEP_GPUS"
#define PILOT "MURI_PILOT"

enum {
	WAIT_MS = 30000,	/* for the pilot's tasks to start: Slurm starts a member when slurmctld has started its pilot */
	LOOK_MS = 20,
	WHY_SIZE = 256,
	TEMPORARY = 75,	/* the exit code of a task whose grant failed, as in sysexits.h */
};

/* What slurmstepd's main process tells the processes that become tasks. */
struct told {
	char why[WHY_SIZE];	/* the grant failed */
	bool kept;	/* for a reason that is the step's own: its job goes on */
	struct {
		bool ready;
		bool limited;	/* it can open its GPUs alone, and programs count only these */
		bool narrowed;	/* of the job's GPUs only its part */
	} task[];
};

static struct {
	bool wanted;	/* this step has a grant, or had to have one */
	bool asked;	/* grant.run and grant.license are slurmctld's */
	bool batch;
	int node;
	int mounts;	/* slurmstepd's mount namespace */
	pid_t stepd;
	uint32_t tasks;
	uint32_t each;	/* GPUs that a task asks for, 0: all */
	size_t first;	/* of the job's GPUs the step's first one, by its place */
	int places;	/* holds the step's GPUs against other steps that ask for some */
	uint32_t ended;	/* tasks */
	struct muri_grant grant;
	struct muri_job pilot;
	struct muri_gpus gpus;
	struct told *told;
} member = {.node = -1, .mounts = -1, .places = -1};

/* The grant has failed: the step's tasks will not run. The first reason is the one that counts. */
__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
	va_list arguments;

	if (!member.told || member.told->why[0])
		return;
	va_start(arguments, format);
	vsnprintf(member.told->why, sizeof(member.told->why), format, arguments);
	va_end(arguments);
	slurm_info("muri: job %u: %s", member.grant.job, member.told->why);
}

static int open_node(void)
{
	char error[256];
	int node = muri_node_dir(MURI_RUN_PARENT, getenv("SLURMD_NODENAME"), error, sizeof(error));

	if (node < 0)
		slurm_error("muri: %s", error);
	return node;
}

static bool in_environment(spank_t spank, const char *name)
{
	char value[4];
	spank_err_t failure = spank_getenv(spank, name, value, sizeof(value));

	return failure == ESPANK_SUCCESS || failure == ESPANK_NOSPACE;
}

/* Note in which variables slurmd names the job's GPUs to the prolog: Slurm sets the same ones for its tasks. */
static void note_names(struct muri_job *job)
{
	static const char *const names[] = {
		"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL",
	};
	const char *cuda = getenv("CUDA_VISIBLE_DEVICES"), *sluid = getenv("SLURM_JOB_SLUID");

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (getenv(names[i]) && strlen(job->variables) + strlen(names[i]) + 2 < sizeof(job->variables)) {
			if (job->variables[0])
				strcat(job->variables, ",");
			strcat(job->variables, names[i]);
		}
	if (cuda && strncmp(cuda, "MIG-", 4) == 0 && strlen(cuda) < sizeof(job->mig))
		strcpy(job->mig, cuda);
	if (sluid && muri_is_sluid(sluid, strlen(sluid)))
		strcpy(job->sluid, sluid);
}

void muri_member_prolog(spank_t spank)
{
	const char *gpus = getenv("SLURM_JOB_GPUS");
	struct muri_job job = {0};
	struct muri_gpus numbers;
	int node, lock;

	if (!gpus || strlen(gpus) >= sizeof(job.gpus) || !muri_read_gpus(gpus, &numbers) ||
	    spank_get_item(spank, S_JOB_ID, &job.id) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &job.uid) != ESPANK_SUCCESS)
		return;
	node = open_node();
	if (node < 0)
		return;
	strcpy(job.gpus, gpus);
	note_names(&job);
	lock = muri_node_lock(node);
	if (lock < 0 || muri_job_write(node, &job))
		slurm_error("muri: cannot note the GPUs of job %u: %m", job.id);
	if (lock >= 0)
		close(lock);
	close(node);
}

/* Take what slurmctld knows about this job. Returns its answer about a grant, or -1 after a failure. */
static int take_answer(const job_info_msg_t *answer)
{
	for (uint32_t i = 0; i < answer->record_count; i++) {
		const slurm_job_info_t *job = &answer->job_array[i];

		/* An array's number stands for all its tasks. */
		if (job->job_id != member.grant.job)
			continue;
		member.asked = true;
		member.grant.run = job->restart_cnt;
		member.grant.license = muri_waits_for_license(job->admin_comment);
		return (int)muri_granted_pilot(job->admin_comment, &member.grant.pilot);
	}
	return -1;
}

static int ask(void)
{
	job_info_msg_t *answer = NULL;
	int granted;

	if (slurm_load_job(&answer, member.grant.job, SHOW_ALL))
		return -1;
	granted = take_answer(answer);
	slurm_free_job_info_msg(answer);
	return granted;
}

/* Read what the pilot holds here and, under the same lock, note the grant. 1: done; 0: not there yet; -1: failed. */
static int note_grant(void)
{
	struct muri_grant noted;
	int lock = muri_node_lock(member.node), done = -1;

	if (lock < 0) {
		fail("cannot lock the notes of GPUs on this node");
		return -1;
	}
	/* Of a step that has started meanwhile. */
	if (muri_grant_read(member.node, member.grant.job, &noted) == 0 && noted.run == member.grant.run)
		strcpy(member.grant.cgroup, noted.cgroup);
	if (muri_job_read(member.node, member.grant.pilot, &member.pilot))
		done = 0;
	else if (member.pilot.uid != member.grant.uid)
		fail("the pilot job %u is another user's", member.grant.pilot);
	else if (!muri_read_gpus(member.pilot.gpus, &member.gpus))
		fail("the pilot job %u has no GPUs here", member.grant.pilot);
	else if (muri_grant_write(member.node, &member.grant))
		fail("cannot note the grant on this node");
	else
		done = 1;
	close(lock);
	return done;
}

static void await_pilot(void)
{
	int64_t end = muri_now_ms() + WAIT_MS;
	int noted;

	while ((noted = note_grant()) == 0 && muri_now_ms() < end)
		poll(NULL, 0, LOOK_MS);
	if (noted == 0)
		fail("the pilot job %u holds no GPUs on this node", member.grant.pilot);
}

/* The memory in which tasks are told, which no grant can do without. */
static bool share_memory(void)
{
	size_t size = sizeof(*member.told) + member.tasks * sizeof(member.told->task[0]);
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return false;
	member.told = memory;
	return true;
}

/*
 * Whether the job has a grant here from an earlier step; a batch step asks anew. It is this run's: Slurm does not tell
 * steps which run it is, but an epilog or the next prolog has ended an earlier one.
 */
static bool has_grant(void)
{
	struct muri_grant *grant = &member.grant, noted;

	if (member.batch || muri_grant_read(member.node, grant->job, &noted) || noted.uid != grant->uid)
		return false;
	*grant = noted;
	member.asked = true;
	return true;
}

/* Whether Slurm gave the job GPUs of its own. The variable is Slurm's own only in a batch step. */
static bool holds_gpus(spank_t spank)
{
	struct muri_job own;

	return (member.batch && in_environment(spank, "SLURM_JOB_GPUS")) ||
	       muri_job_read(member.node, member.grant.job, &own) == 0;
}

static void no_grant(spank_t spank)
{
	if (member.batch)
		muri_grant_remove(member.node, member.grant.job);
	if (in_environment(spank, PILOT))
		spank_unsetenv(spank, PILOT);	/* of the job from which this one was submitted */
}

static void find_grant(spank_t spank)
{
	bool known = has_grant();	/* without the lock, which is nothing to most jobs: files are replaced whole */
	int granted = MURI_GRANTED;

	if (!known && (holds_gpus(spank) || !(in_environment(spank, MARK) || in_environment(spank, MARK_CARRIER)))) {
		no_grant(spank);
		return;
	}
	if (!known)
		granted = ask();
	if (granted == MURI_NOT_GRANTED) {
		no_grant(spank);
		return;
	}
	member.wanted = true;
	member.stepd = getpid();
	member.mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (!share_memory())
		return;
	if (granted == MURI_GRANTED)
		await_pilot();
	else if (granted == MURI_GRANT_UNCLEAR)
		fail("the job's AdminComment has an unclear grant");
	else
		fail("slurmctld does not say whose GPUs this job shares: %s", slurm_strerror(errno));
}

static bool is_step_with_tasks(uint32_t step)
{
	return step != SLURM_EXTERN_CONT;
}

void muri_member_init(spank_t spank)
{
	uint32_t step = SLURM_EXTERN_CONT;
	char share[32];

	if (spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS || !is_step_with_tasks(step) ||
	    spank_get_item(spank, S_JOB_ID, &member.grant.job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &member.grant.uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &member.tasks) != ESPANK_SUCCESS)
		return;
	member.batch = step == SLURM_BATCH_SCRIPT;
	member.node = open_node();	/* without it a job with a grant fails, and any other does not need it */
	if (!member.batch && spank_getenv(spank, STEP_GPUS, share, sizeof(share)) == ESPANK_SUCCESS &&
	    !muri_per_task(share, &member.each))
		member.each = 0;
	find_grant(spank);
	/* Where too few are left, steps share them from the first one on. */
	if (member.told && !member.told->why[0] && member.each)
		member.places = muri_take_places(member.node, member.grant.job, member.gpus.count,
						 (size_t)member.each * member.tasks, &member.first);
}

/* The task's part of the job's GPUs. False: the job has not so many. */
static bool part_of(uint32_t task, struct muri_part *part)
{
	if (!muri_part_of_task(member.gpus.count - member.first, member.each, task, part))
		return false;
	part->first += member.first;
	return true;
}

/* Open the task's devices under the lock, while the pilot still holds them. 1: done; 0: not yet; -1: failed. */
static int open_task(const struct muri_cgroup *cgroup, struct muri_part part, uint32_t task)
{
	struct muri_opening opening = {
		.node = member.node,
		.cgroup = cgroup,
		.pilot = &member.pilot,
		.gpus = member.gpus.count,
		.part = part,
	};
	int lock = muri_node_lock(member.node), done = -1;

	memcpy(member.grant.cgroup, cgroup->leaf, cgroup->job_size);
	member.grant.cgroup[cgroup->job_size] = '\0';
	if (lock < 0 || muri_job_read(member.node, member.grant.pilot, &member.pilot) ||
	    member.pilot.uid != member.grant.uid)
		fail("the pilot job %u, whose GPUs this job shares, has ended", member.grant.pilot);
	else if (muri_grant_write(member.node, &member.grant))
		fail("cannot note the grant on this node");
	else if (!member.told->task[task].limited)
		done = 1;
	else
		done = muri_open_devices(&opening, &member.told->task[task].narrowed);
	if (lock >= 0)
		close(lock);
	return done;
}

static void open_devices(pid_t pid, uint32_t task)
{
	int64_t end = muri_now_ms() + WAIT_MS;
	struct muri_cgroup cgroup;
	struct muri_part part;
	int done, limits;

	if (!part_of(task, &part)) {
		member.told->kept = !member.told->why[0];
		fail("each task asks for %u GPUs, and the job has %zu on this node: not enough for task %u", member.each,
		     member.gpus.count, task);
		return;
	}
	limits = muri_cgroup_find(pid, member.grant.job, &cgroup) < 0 ? -1 : muri_constrains_devices(&cgroup);
	if (limits < 0) {
		fail("the kernel does not say whether the job's devices are limited");
		return;
	}
	member.told->task[task].limited = limits;
	while ((done = open_task(&cgroup, part, task)) == 0 && muri_now_ms() < end)
		poll(NULL, 0, LOOK_MS);
	if (done == 0)
		fail("the GPUs of the pilot job %u cannot be opened", member.grant.pilot);
	member.told->task[task].ready = done == 1;
}

struct forked {
	pid_t pid;
	uint32_t task;
};

static void open_for(void *context)
{
	const struct forked *forked = context;

	open_devices(forked->pid, forked->task);
}

void muri_member_forked(spank_t spank)
{
	struct forked forked;
	int number;

	if (!member.wanted || !member.told || member.told->why[0])
		return;
	if (spank_get_item(spank, S_TASK_ID, &number) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_PID, &forked.pid) != ESPANK_SUCCESS || number < 0 || (uint32_t)number >= member.tasks)
		return;
	forked.task = (uint32_t)number;
	/* With SlurmdParameters=contain_spank this is a process of its own in the job's mount namespace. */
	if (getpid() == member.stepd)
		open_for(&forked);
	else if (!muri_act_in(member.mounts, open_for, &forked))
		fail("the job's mount namespace cannot be left");
}

static void set(spank_t spank, const char *name, const char *value, int overwrite)
{
	spank_setenv(spank, name, value, overwrite);
}

/* Name the task's GPUs to programs, each time as Slurm would have done it. */
static bool set_variables(spank_t spank, struct muri_part part, uint32_t task)
{
	bool limited = member.told->task[task].limited, narrowed = member.told->task[task].narrowed;
	struct muri_part shown = {.first = narrowed ? 0 : part.first, .count = part.count};
	char visible[MURI_MIG_SIZE], numbers[MURI_GPUS_SIZE], count[16], pilot[16];
	char names[MURI_VARIABLES_SIZE], *rest = names, *name;

	if (!muri_list_numbers(&member.gpus, part, numbers, sizeof(numbers)) ||
	    !(member.pilot.mig[0] ? muri_list_words(member.pilot.mig, part, visible, sizeof(visible)) :
				    muri_list_numbers(limited ? NULL : &member.gpus, limited ? shown : part, visible,
						      sizeof(visible))))
		return false;
	snprintf(count, sizeof(count), "%zu", member.gpus.count);
	snprintf(pilot, sizeof(pilot), "%lu", (unsigned long)member.grant.pilot);
	strcpy(names, member.pilot.variables);
	while ((name = strsep(&rest, ",")) && *name) {
		set(spank, name, visible, 1);
		if (strcmp(name, "CUDA_VISIBLE_DEVICES") == 0)
			set(spank, "NVIDIA_VISIBLE_DEVICES", visible, 0);	/* containers'; Slurm leaves it to users */
	}
	set(spank, "SLURM_JOB_GPUS", member.pilot.gpus, 1);
	set(spank, "SLURM_GPUS_ON_NODE", count, 1);
	if (!member.batch)
		set(spank, "SLURM_STEP_GPUS", numbers, 1);
	set(spank, PILOT, pilot, 1);
	return true;
}

void muri_member_task(spank_t spank)
{
	const char *why = "no memory";
	struct muri_part part;
	int number;

	if (!member.wanted)
		return;
	if (member.told && spank_get_item(spank, S_TASK_ID, &number) == ESPANK_SUCCESS && number >= 0 &&
	    (uint32_t)number < member.tasks && member.told->task[number].ready &&
	    part_of((uint32_t)number, &part) &&
	    set_variables(spank, part, (uint32_t)number))
		return;
	/* The first reason is told, and for it the job goes back. */
	fail("the GPUs of the pilot job %u cannot be named to its programs", member.grant.pilot);
	if (member.told)
		why = member.told->why;
	/* Slurm would ignore a failure of an `optional` plugin and run the program without its GPUs. */
	dprintf(STDERR_FILENO, "muri: %s%s\n", why,
		member.told && member.told->kept ? "" : "; the job goes back to the queue");
	_exit(TEMPORARY);
}

void muri_member_task_ended(void)
{
	if (member.places < 0 || ++member.ended < member.tasks)
		return;
	close(member.places);
	member.places = -1;
}

void muri_member_exit(spank_t spank)
{
	(void)spank;
	if (!member.wanted || geteuid() != 0 || (member.told && (!member.told->why[0] || member.told->kept)))
		return;
	if ((member.asked || ask() >= 0) && !muri_requeue_for(&member.grant, NULL))
		slurm_error("muri: slurmctld does not take job %u back into the queue", member.grant.job);
	member.wanted = false;
}
