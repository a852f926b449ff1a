/*
 * What root notes about jobs, without Slurm.
 *
 *   try_node PARENT NODE VERB WORD…
 *
 * Verbs: write-job ID UID GPUS, read-job ID, remove-job ID, write-grant JOB PILOT UID RUN hold|license
 * CGROUP, read-grant JOB, remove-grant JOB, grants PILOT, hold (takes the lock, says so and keeps it until its input ends),
 * take JOB GPUS COUNT (so, too, with places of GPUs).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "muri.h"

enum { MOST = 4 };

static uint32_t number(const char *text)
{
	uint32_t value;

	if (!muri_number(text, &value)) {
		fprintf(stderr, "%s must be a number\n", text);
		exit(64);
	}
	return value;
}

static int outcome(int failure)
{
	if (failure)
		perror("refused");
	return failure ? 1 : 0;
}

static int write_job(int node, char *words[])
{
	struct muri_job job = {.id = number(words[0]), .uid = number(words[1])};

	snprintf(job.gpus, sizeof(job.gpus), "%s", words[2]);
	return outcome(muri_job_write(node, &job));
}

static int write_grant(int node, char *words[])
{
	struct muri_grant grant = {.job = number(words[0]), .pilot = number(words[1]), .uid = number(words[2])};

	grant.run = number(words[3]);
	grant.license = strcmp(words[4], "license") == 0;
	snprintf(grant.cgroup, sizeof(grant.cgroup), "%s", words[5]);
	return outcome(muri_grant_write(node, &grant));
}

static int read_job(int node, uint32_t id)
{
	struct muri_job job;

	if (muri_job_read(node, id, &job))
		return outcome(-1);
	printf("%lu %lu %s\n", (unsigned long)job.id, (unsigned long)job.uid, job.gpus);
	return 0;
}

static int read_grant(int node, uint32_t id)
{
	struct muri_grant grant;

	if (muri_grant_read(node, id, &grant))
		return outcome(-1);
	printf("%lu %lu %lu %lu %s %s\n", (unsigned long)grant.job, (unsigned long)grant.pilot,
	       (unsigned long)grant.uid, (unsigned long)grant.run, grant.license ? "license" : "hold", grant.cgroup);
	return 0;
}

static int list(int node, uint32_t pilot)
{
	uint32_t jobs[MOST];
	ssize_t count = muri_grants_of(node, pilot, jobs, MOST);

	for (ssize_t i = 0; i < count; i++)
		printf("%lu\n", (unsigned long)jobs[i]);
	return outcome(count < 0);
}

static int keep(int file, const char *what)
{
	puts(file < 0 ? "none" : what);
	fflush(stdout);
	while (getchar() != EOF)
		;
	return outcome(close(file));
}

static int take(int node, char *words[])
{
	size_t first = 99;
	int places = muri_take_places(node, number(words[0]), number(words[1]), number(words[2]), &first);
	char text[32];

	snprintf(text, sizeof(text), "%zu", first);
	return keep(places, text);
}

int main(int count, char *words[])
{
	char error[256];
	int node = count > 3 ? muri_node_dir(words[1], words[2], error, sizeof(error)) : -1;
	const char *verb = count > 3 ? words[3] : "";

	if (count <= 3)
		return 64;
	if (node < 0) {
		fprintf(stderr, "%s\n", error);
		return 1;
	}
	if (strcmp(verb, "hold") == 0)
		return keep(muri_node_lock(node), "locked");
	if (strcmp(verb, "take") == 0 && count == 7)
		return take(node, words + 4);
	if (strcmp(verb, "write-job") == 0 && count == 7)
		return write_job(node, words + 4);
	if (strcmp(verb, "write-grant") == 0 && count == 10)
		return write_grant(node, words + 4);
	if (count != 5)
		return 64;
	if (strcmp(verb, "read-job") == 0)
		return read_job(node, number(words[4]));
	if (strcmp(verb, "read-grant") == 0)
		return read_grant(node, number(words[4]));
	if (strcmp(verb, "remove-job") == 0)
		return outcome(muri_job_remove(node, number(words[4])));
	if (strcmp(verb, "remove-grant") == 0)
		return outcome(muri_grant_remove(node, number(words[4])));
	return strcmp(verb, "grants") == 0 ? list(node, number(words[4])) : 64;
}
