/* Puts the jobs that had another job's GPUs back into the queue. */
#define _GNU_SOURCE
#define SLURM_BACKWARD_COMPAT	/* from 26.05 on jobs have numbers only with this */
#include <errno.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

#include "muri.h"

enum {
	NAME_SIZE = 32,
	FIRST_OTHER_ERROR = 3000,	/* behind those of slurmctld in slurm_errno.h */
};

/* Whether an error is slurmctld's answer. Others may pass, such as its absence. */
static bool is_answer(int error)
{
	return error >= ESLURM_INVALID_PARTITION_NAME && error < FIRST_OTHER_ERROR && error != ESLURM_IN_STANDBY_MODE;
}

/* The one error of a call for one job: what slurmctld said of it, or why there was no answer. */
static int error_of(int failed, job_array_resp_msg_t *answer)
{
	int error = failed ? errno : 0;

	if (answer) {
		if (answer->job_array_count && answer->error_code[0])
			error = (int)answer->error_code[0];
		slurm_free_job_array_resp(answer);
	}
	return error;
}

/* A job's name: the number alone of an array's task may stand for all of them. */
static void name_job(const slurm_job_info_t *job, char name[NAME_SIZE])
{
	if (job->array_job_id && job->array_task_id != NO_VAL)
		snprintf(name, NAME_SIZE, "%u_%u", job->array_job_id, job->array_task_id);
	else
		snprintf(name, NAME_SIZE, "%u", job->job_id);
}

static bool is_running(const slurm_job_info_t *job)
{
	uint32_t state = job->job_state & JOB_STATE_BASE;

	return (state == JOB_RUNNING || state == JOB_SUSPENDED) && !(job->job_state & JOB_COMPLETING);
}

static int requeue(const slurm_job_info_t *job, bool held)
{
	/* JOB_RUNNING: not a job that has ended meanwhile, for example because its user canceled it. */
	uint32_t flags = JOB_RUNNING | (held ? JOB_REQUEUE_HOLD : 0);
	job_array_resp_msg_t *answer = NULL;
	char name[NAME_SIZE];
	int failed;

	name_job(job, name);
	failed = slurm_requeue2(name, flags, &answer);
	return error_of(failed, answer);
}

/* End a job that Slurm does not requeue, such as an interactive one: better canceled than failed for no reason. */
static int cancel(const slurm_job_info_t *job)
{
	return slurm_kill_job(job->job_id, SIGKILL, 0) ? errno : 0;
}

static bool end_run(const slurm_job_info_t *job, const struct muri_grant *grant, const char *why)
{
	char text[256];
	int error;

	if (why) {
		snprintf(text, sizeof(text), "muri: %s; the job goes back to the queue", why);
		slurm_notify_job(job->job_id, text);	/* to the job's output */
	}
	error = requeue(job, !grant->license);
	if (!error || error == ESLURM_JOB_PENDING || error == ESLURM_INVALID_JOB_ID)
		return true;
	if (!is_answer(error))
		return false;
	slurm_info("muri: job %u cannot be requeued (%s) and is canceled", job->job_id, slurm_strerror(error));
	error = cancel(job);
	return !error || is_answer(error);
}

/* Load Slurm's plugins, which slurmstepd has, and a prolog or epilog has not. */
static void prepare(void)
{
	static bool prepared;

	if (!prepared && spank_context() == S_CTX_JOB_SCRIPT)
		slurm_init(NULL);
	prepared = true;
}

bool muri_has_ended(uint32_t job)
{
	job_info_msg_t *answer = NULL;
	bool ended = true;

	prepare();
	if (slurm_load_job(&answer, job, SHOW_ALL))
		return errno == ESLURM_INVALID_JOB_ID;
	for (uint32_t i = 0; i < answer->record_count; i++) {
		const slurm_job_info_t *found = &answer->job_array[i];

		if (found->job_id == job && (is_running(found) || (found->job_state & JOB_COMPLETING)))
			ended = false;
	}
	slurm_free_job_info_msg(answer);
	return ended;
}

bool muri_requeue_for(const struct muri_grant *grant, const char *why)
{
	job_info_msg_t *answer = NULL;
	bool done = true;

	prepare();
	if (slurm_load_job(&answer, grant->job, SHOW_ALL))
		return is_answer(errno);
	for (uint32_t i = 0; i < answer->record_count; i++) {
		const slurm_job_info_t *job = &answer->job_array[i];

		/* An array's number stands for all its tasks. This grant is not for a later run of the job. */
		if (job->job_id == grant->job && job->restart_cnt == grant->run && is_running(job))
			done = end_run(job, grant, why);
	}
	slurm_free_job_info_msg(answer);
	return done;
}

bool muri_requeue(const struct muri_grant *grant)
{
	char why[128];

	snprintf(why, sizeof(why), "the pilot job %u, whose GPUs this job shared, has ended", grant->pilot);
	return muri_requeue_for(grant, why);
}
