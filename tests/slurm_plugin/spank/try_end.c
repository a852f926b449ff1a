/*
 * The end of a job without Slurm: tests stand in for slurmctld.
 *
 *   muri_try_end end DIRECTORY NODE JOB ASK_MS GRACE_MS HURRY_MS   as the epilog of a job; $HOOK is a shell text, given
 *                                                                  the member's number: 0 if slurmctld has answered
 *   muri_try_end prolog DIRECTORY NODE JOB GPUS                    as the prolog of a job; 0 from $ENDED with a pilot's
 *                                                                  number: slurmctld says that it has ended
 *   muri_try_end count|kill JOB UID NODE CGROUP                    prints how many processes a job has
 *   muri_try_end grant DIRECTORY JOB PILOT UID RUN CGROUP          writes a grant
 *   muri_try_end holds DIRECTORY JOB UID                           notes that a job holds GPUs
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "muri.h"

enum { USAGE = 64 };

static uint32_t number(const char *text)
{
	uint32_t value = 0;

	if (!muri_number(text, &value))
		exit(USAGE);
	return value;
}

static bool hook(const struct muri_grant *grant)
{
	char text[1024];

	snprintf(text, sizeof(text), "set -- %u %s; %s", grant->job, grant->license ? "license" : "hold",
		 getenv("HOOK"));
	return system(text) == 0;	/* NOLINT */
}

static bool has_ended(uint32_t job)
{
	char text[1024];

	snprintf(text, sizeof(text), "set -- %u; %s", job, getenv("ENDED"));
	return system(text) == 0;	/* NOLINT */
}

static void say(const char *text)
{
	puts(text);
	fflush(stdout);
}

static int at(const char *path)
{
	int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (directory < 0)
		exit(USAGE);
	return directory;
}

static struct muri_grant grant_of(const char *job, const char *pilot, const char *uid, const char *run, const char *cgroup)
{
	struct muri_grant grant = {.job = number(job), .pilot = number(pilot), .uid = number(uid), .run = number(run)};

	snprintf(grant.cgroup, sizeof(grant.cgroup), "%s", cgroup);
	return grant;
}

int main(int count, char *words[])
{
	const char *what = count > 1 ? words[1] : "";

	if (strcmp(what, "end") == 0 && count == 8) {
		struct muri_end end = {.requeue = hook, .say = say};

		end.ask_ms = (int)number(words[5]);
		end.grace_ms = (int)number(words[6]);
		end.hurry_ms = (int)number(words[7]);
		muri_end_job(at(words[2]), words[3], number(words[4]), &end);
		return 0;
	}
	if (strcmp(what, "prolog") == 0 && count == 6) {
		struct muri_end end = {hook, has_ended, say, 600000, 600000, 0};

		muri_end_stale(at(words[2]), words[3], number(words[4]), words[5], &end);
		return 0;
	}
	if ((strcmp(what, "count") == 0 || strcmp(what, "kill") == 0) && count == 6) {
		struct muri_grant grant = grant_of(words[2], "0", words[3], "0", words[5]);

		printf("%zu\n", muri_processes(&grant, words[4], strcmp(what, "kill") == 0));
		return 0;
	}
	if (strcmp(what, "grant") == 0 && count == 8) {
		struct muri_grant grant = grant_of(words[3], words[4], words[5], words[6], words[7]);

		return muri_grant_write(at(words[2]), &grant) != 0;
	}
	if (strcmp(what, "holds") == 0 && count == 5) {
		struct muri_job job = {.id = number(words[3]), .uid = number(words[4]), .gpus = "0"};

		return muri_job_write(at(words[2]), &job) != 0;
	}
	return USAGE;
}
