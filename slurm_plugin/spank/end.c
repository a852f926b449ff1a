/*
 * The end of a job on this node: what other jobs had of its GPUs is over before Slurm gives these to the next job.
 *
 * Three processes, because slurmd ends the first one when it stops, and a call to slurmctld may last:
 *   the epilog waits for the second one, and slurmd for the epilog;
 *   the keeper watches the members' processes and kills those that are left;
 *   the asker puts the members' jobs back into the queue.
 * Without its epilog the keeper has no time to give: slurmd does not run an epilog again that it has ended.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "muri.h"

enum {
	LOOK_MS = 50,
	RETRY_MS = 500,
	COMPLAIN_MS = 30000,
	LEFTOVER_MS = 5000,	/* for processes that outlive a member */
	FIRST_MOST = 64,
	MOST_GRANTS = 1 << 20,
};

struct member {
	struct muri_grant grant;
	bool asked;	/* slurmctld has said what becomes of the job */
	int64_t kill_at_ms;
};

struct keeper {
	int node;
	const char *name;
	const struct muri_end *end;
	struct member *members;
	size_t count;
	int epilog;	/* at its end when the epilog is */
	int answers;	/* the asker's: numbers of members; -1 without an asker */
	int64_t complain_at_ms;
};

/*
 * Whether the grant is still that of the run to which it was given. Once the run's own epilog has removed it, the job's
 * number and its cgroup may be another run's.
 */
static bool still_given(int node, struct muri_grant *grant)
{
	struct muri_grant now;

	if (muri_grant_read(node, grant->job, &now) || now.pilot != grant->pilot || now.run != grant->run)
		return false;
	*grant = now;
	return true;
}

/* Count the processes of a grant's run, or kill and count them. The lock keeps a later run from its grant meanwhile. */
static size_t processes_of(const struct keeper *keeper, struct muri_grant *grant, bool killing)
{
	int lock = muri_node_lock(keeper->node);
	size_t found = still_given(keeper->node, grant) ? muri_processes(grant, keeper->name, killing) : 0;

	if (lock >= 0)
		close(lock);
	return found;
}

/* New sessions of a member's user must not open its GPUs any more; the old ones are among its processes. */
static void close_adopted(const struct keeper *keeper, struct muri_grant *grant)
{
	int lock = muri_node_lock(keeper->node);

	if (still_given(keeper->node, grant) && *grant->cgroup)
		muri_close_adopted(grant->cgroup);
	if (lock >= 0)
		close(lock);
}

static void complain(struct keeper *keeper, const struct muri_grant *grant, size_t left)
{
	char text[128];

	if (muri_now_ms() < keeper->complain_at_ms)
		return;
	keeper->complain_at_ms = muri_now_ms() + COMPLAIN_MS;
	snprintf(text, sizeof(text), "muri: %zu processes of job %lu do not end; its pilot's GPUs stay closed", left,
		 (unsigned long)grant->job);
	keeper->end->say(text);
}

/* Look at all members once; returns how many still have processes. */
static size_t look(struct keeper *keeper)
{
	size_t left = 0;

	for (size_t i = 0; i < keeper->count; i++) {
		struct member *member = &keeper->members[i];
		bool killing = muri_now_ms() >= member->kill_at_ms;
		size_t found = processes_of(keeper, &member->grant, killing);

		left += found != 0;
		if (found && muri_now_ms() >= member->kill_at_ms + LEFTOVER_MS)
			complain(keeper, &member->grant, found);
	}
	return left;
}

/* From now on each member has at most this long. */
static void hurry(struct keeper *keeper, int64_t ms)
{
	for (size_t i = 0; i < keeper->count; i++) {
		struct member *member = &keeper->members[i];

		if (member->kill_at_ms > muri_now_ms() + ms)
			member->kill_at_ms = muri_now_ms() + ms;
	}
}

/* A member whose job slurmctld is ending has a little time to end by itself. */
static void take_answers(struct keeper *keeper)
{
	uint32_t number;
	ssize_t size = -1;

	while (keeper->answers >= 0 &&
	       (size = read(keeper->answers, &number, sizeof(number))) == (ssize_t)sizeof(number)) {
		struct member *member = &keeper->members[number];
		int64_t at_ms = muri_now_ms() + keeper->end->grace_ms;

		member->asked = true;
		if (member->kill_at_ms > at_ms)
			member->kill_at_ms = at_ms;
	}
	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	close(keeper->answers);
	keeper->answers = -1;
}

/* Wait for news, a little while at most. */
static void wait_for_news(struct keeper *keeper)
{
	struct pollfd from[2] = {
		{.fd = keeper->epilog, .events = POLLIN},	/* poll leaves out what is negative */
		{.fd = keeper->answers, .events = POLLIN},
	};

	if (poll(from, 2, LOOK_MS) <= 0)
		return;
	if (from[1].revents)
		take_answers(keeper);
	if (from[0].revents) {
		keeper->epilog = -1;
		hurry(keeper, keeper->end->hurry_ms);
	}
}

static bool all_asked(const struct keeper *keeper)
{
	for (size_t i = 0; i < keeper->count; i++)
		if (!keeper->members[i].asked)
			return false;
	return true;
}

static void keep(struct keeper *keeper)
{
	int64_t ask_until_ms = muri_now_ms() + keeper->end->ask_ms;

	for (size_t i = 0; i < keeper->count; i++)
		keeper->members[i].kill_at_ms = ask_until_ms + keeper->end->grace_ms;
	/* Slurm must hear of a requeue before it hears that a process was killed, or the job has failed. */
	while (look(keeper) || (keeper->answers >= 0 && !all_asked(keeper) && muri_now_ms() < ask_until_ms &&
				keeper->epilog >= 0)) {
		wait_for_news(keeper);
		if (keeper->answers < 0 && !all_asked(keeper))
			hurry(keeper, 0);	/* no asker any more */
	}
}

static void ask_for_all(const struct keeper *keeper, int answers)
{
	for (uint32_t i = 0; i < keeper->count; i++) {
		while (!keeper->end->requeue(&keeper->members[i].grant))
			poll(NULL, 0, RETRY_MS);
		if (write(answers, &i, sizeof(i)) != (ssize_t)sizeof(i))
			return;
	}
}

/* Start the asker; returns its process, or -1. */
static pid_t start_asker(struct keeper *keeper)
{
	int answers[2];
	pid_t asker;

	if (pipe2(answers, O_CLOEXEC | O_NONBLOCK))
		return -1;
	asker = fork();
	if (asker == 0) {
		ask_for_all(keeper, answers[1]);
		_exit(0);
	}
	close(answers[1]);
	keeper->answers = asker < 0 ? -1 : answers[0];
	if (asker < 0)
		close(answers[0]);
	return asker;
}

static void keep_and_ask(struct keeper *keeper)
{
	pid_t asker = start_asker(keeper);

	keep(keeper);
	if (asker > 0) {
		kill(asker, SIGKILL);
		waitpid(asker, NULL, 0);
	}
}

/* Wait for the keeper, and let go of it when slurmd, whose child this is, has gone. Returns whether it did its work. */
static bool wait_for(pid_t keeper, int *epilog)
{
	pid_t slurmd = getppid(), ended;
	int status = -1;

	while ((ended = waitpid(keeper, &status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
		if (*epilog >= 0 && getppid() != slurmd) {
			close(*epilog);
			*epilog = -1;
		}
		poll(NULL, 0, LOOK_MS);
	}
	return ended == keeper && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void end_members(struct keeper *keeper)
{
	int epilog[2] = {-1, -1};
	pid_t process = pipe2(epilog, O_CLOEXEC) ? -1 : fork();
	bool ended;

	if (process == 0) {
		setsid();	/* slurmd kills the epilog's process group when it stops */
		close(epilog[1]);
		keeper->epilog = epilog[0];
		keep_and_ask(keeper);
		_exit(0);
	}
	if (epilog[0] >= 0)
		close(epilog[0]);
	ended = process > 0 && wait_for(process, &epilog[1]);
	if (epilog[1] >= 0)
		close(epilog[1]);
	if (ended)
		return;
	/* No keeper, or one that was killed: slurmctld is not asked any more, but no member keeps a GPU either. */
	while (look(keeper))
		poll(NULL, 0, LOOK_MS);
}

/* Remove a grant that no process has any more. With processes left the next end, or prolog, must find it. */
static void remove_unused(struct keeper *keeper, struct muri_grant *grant)
{
	int lock = muri_node_lock(keeper->node);

	if (still_given(keeper->node, grant) && !muri_processes(grant, keeper->name, false))
		muri_grant_remove(keeper->node, grant->job);
	if (lock >= 0)
		close(lock);
}

/* A member's job has ended; what has outlived it, for example its killed slurmstepd, does not keep the GPU. */
static void end_own_grant(struct keeper *keeper, struct muri_grant *own)
{
	int64_t until_ms = muri_now_ms() + LEFTOVER_MS;

	while (processes_of(keeper, own, true) && muri_now_ms() < until_ms)
		poll(NULL, 0, LOOK_MS);
	remove_unused(keeper, own);
}

/* List the jobs with a grant from this one, or from any with 0; NULL without any, or with -1 in `count`. */
static uint32_t *list_grants(int node, uint32_t pilot, ssize_t *count)
{
	uint32_t *jobs = NULL;

	*count = FIRST_MOST;
	for (size_t most = FIRST_MOST; (size_t)*count == most && most < MOST_GRANTS; most *= 2) {
		free(jobs);
		jobs = calloc(2 * most, sizeof(*jobs));
		*count = jobs ? muri_grants_of(node, pilot, jobs, 2 * most) : -1;
	}
	if (*count > 0)
		return jobs;
	free(jobs);
	return NULL;
}

/* Read the grants from a job. Returns 0, or -1 with errno. */
static int read_members(struct keeper *keeper, uint32_t job)
{
	ssize_t count;
	uint32_t *jobs = list_grants(keeper->node, job, &count);

	keeper->members = jobs ? calloc((size_t)count, sizeof(*keeper->members)) : NULL;
	for (ssize_t i = 0; keeper->members && i < count; i++)
		if (muri_grant_read(keeper->node, jobs[i], &keeper->members[keeper->count].grant) == 0)
			keeper->count++;
	free(jobs);
	return count < 0 || (count > 0 && !keeper->members) ? -1 : 0;
}

void muri_end_job(int node, const char *name, uint32_t job, const struct muri_end *end)
{
	struct keeper keeper = {.node = node, .name = name, .end = end, .epilog = -1, .answers = -1};
	struct muri_grant own;
	int lock = muri_node_lock(node);

	if (muri_job_remove(node, job))
		end->say("muri: cannot remove the note that this job holds GPUs");
	if (lock >= 0)
		close(lock);
	/* From here on no job gets a grant from this one. */
	while (read_members(&keeper, job)) {
		end->say("muri: cannot tell which jobs had this job's GPUs; they stay closed");
		poll(NULL, 0, LEFTOVER_MS);
	}
	if (muri_grant_read(node, job, &own) == 0)
		end_own_grant(&keeper, &own);
	for (size_t i = 0; i < keeper.count; i++)
		close_adopted(&keeper, &keeper.members[i].grant);
	if (keeper.count)
		end_members(&keeper);
	for (size_t i = 0; i < keeper.count; i++)
		remove_unused(&keeper, &keeper.members[i].grant);	/* its own epilog may never run */
	free(keeper.members);
}

/* Whether a pilot's note says that it holds other GPUs than these: most do, and slurmctld need not be asked. */
static bool holds_others(int node, uint32_t pilot, const struct muri_gpus *gpus)
{
	struct muri_gpus held;
	struct muri_job noted;

	if (muri_job_read(node, pilot, &noted) || !muri_read_gpus(noted.gpus, &held))
		return false;
	for (size_t i = 0; i < held.count; i++)
		for (size_t j = 0; j < gpus->count; j++)
			if (held.number[i] == gpus->number[j])
				return false;
	return true;
}

void muri_end_stale(int node, const char *name, uint32_t job, const char *gpus, const struct muri_end *end)
{
	struct muri_end at_once = *end;
	struct muri_gpus numbers;
	bool known = muri_read_gpus(gpus, &numbers);
	ssize_t count;
	uint32_t *jobs = list_grants(node, 0, &count), looked_at = job;

	at_once.grace_ms = 0;
	for (ssize_t i = 0; i < count; i++) {
		struct muri_grant grant;

		if (muri_grant_read(node, jobs[i], &grant) || grant.pilot == looked_at || grant.pilot == job)
			continue;
		looked_at = grant.pilot;	/* most grants have the same one */
		if (known && holds_others(node, grant.pilot, &numbers))
			continue;
		if (end->has_ended(grant.pilot))
			muri_end_job(node, name, grant.pilot, &at_once);
	}
	free(jobs);
}
