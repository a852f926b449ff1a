/* Finds and kills a job's processes on this node, whatever its user has done to hide them. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "muri.h"

enum {
	MOST_DEPTH = 64,	/* cgroups below a job's */
	PROC_NAME_SIZE = 64,
	LINK_SIZE = 4096,
	MOST_ENVIRONMENT = 8 << 20,	/* the kernel starts no program with more than 6 MiB */
};

/* What is in a cgroup and below it. */
struct found {
	size_t own;	/* Slurm's own processes */
	size_t others;
};

/* What to do with a cgroup and those below it. */
typedef void visit_fn(int directory, int depth, struct found *found);

/* Read a process's parent and its user ids: real, effective, saved, of files. */
static bool read_status(pid_t pid, pid_t *parent, uid_t uids[4])
{
	char name[PROC_NAME_SIZE], line[256];
	bool has_parent = false, has_uids = false;
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%ld/status", (long)pid);
	file = fopen(name, "re");
	while (file && !(has_parent && has_uids) && fgets(line, sizeof(line), file)) {
		long number;

		if (sscanf(line, "PPid: %ld", &number) == 1) {
			*parent = (pid_t)number;
			has_parent = true;
		} else if (sscanf(line, "Uid: %u %u %u %u", &uids[0], &uids[1], &uids[2], &uids[3]) == 4) {
			has_uids = true;
		}
	}
	if (file)
		fclose(file);
	return has_parent && has_uids;
}

/* Whether root runs slurmstepd as this process; a name alone is anybody's, also for a program that becomes root. */
static bool is_stepd(pid_t pid, pid_t *parent)
{
	char name[PROC_NAME_SIZE], target[LINK_SIZE];
	const char *base;
	uid_t uids[4];
	ssize_t size;

	if (!read_status(pid, parent, uids) || uids[0] || uids[1] || uids[2] || uids[3])
		return false;
	snprintf(name, sizeof(name), "/proc/%ld/exe", (long)pid);
	size = readlink(name, target, sizeof(target) - 1);
	if (size < 0)
		return false;
	target[size] = '\0';
	base = strrchr(target, '/');
	/* An upgrade may have replaced the file: "slurmstepd (deleted)". */
	return base && (strcmp(base, "/slurmstepd") == 0 || strcmp(base, "/slurmstepd (deleted)") == 0);
}

/* Slurm's own process, which reports the job's end. A child of one is a task that has not yet become its user's. */
static bool is_own(pid_t pid)
{
	pid_t parent = 0, grandparent;

	return is_stepd(pid, &parent) && !is_stepd(parent, &grandparent);
}

/* Count the processes of one cgroup, and kill those that are not Slurm's own. */
static void take_processes(int directory, bool killing, struct found *found)
{
	int file = openat(directory, "cgroup.procs", O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	FILE *stream = file < 0 ? NULL : fdopen(file, "r");
	long pid;

	if (file >= 0 && !stream)
		close(file);
	while (stream && fscanf(stream, "%ld", &pid) == 1) {
		if (pid <= 1)	/* 0: of another PID namespace */
			continue;
		if (is_own((pid_t)pid)) {
			found->own++;
			continue;
		}
		found->others++;
		if (killing)
			kill((pid_t)pid, SIGKILL);
	}
	if (stream)
		fclose(stream);
}

static void for_each_below(int directory, int depth, visit_fn *visit, struct found *found)
{
	int copy = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *entries = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;

	if (copy >= 0 && !entries)
		close(copy);
	while (entries && depth < MOST_DEPTH && (entry = readdir(entries))) {
		int below;

		if (entry->d_name[0] == '.')
			continue;
		below = openat(directory, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (below < 0)
			continue;
		visit(below, depth + 1, found);
		close(below);
	}
	if (entries)
		closedir(entries);
}

static void count_in(int directory, int depth, struct found *found)
{
	take_processes(directory, false, found);
	for_each_below(directory, depth, count_in, found);
}

static void kill_each(int directory, int depth, struct found *found)
{
	take_processes(directory, true, found);
	for_each_below(directory, depth, kill_each, found);
}

/*
 * Kill in a cgroup and below it. Where Slurm has no process of its own, all go at once, so that none can fork
 * meanwhile: by cgroup.kill in version 2; in version 1 they are frozen first, and killed when they thaw.
 */
static void kill_in(int directory, int depth, struct found *found)
{
	struct found here = {0, 0};
	bool frozen;

	count_in(directory, depth, &here);
	found->own += here.own;
	found->others += here.others;
	if (!here.others)
		return;
	if (here.own) {
		here = (struct found){0, 0};
		take_processes(directory, true, &here);
		for_each_below(directory, depth, kill_in, &here);
		return;
	}
	if (muri_write_word(directory, "cgroup.kill", "1"))
		return;
	frozen = muri_write_word(directory, "freezer.state", "FROZEN");
	kill_each(directory, depth, &here);
	if (frozen)
		muri_write_word(directory, "freezer.state", "THAWED");
}

static size_t in_directory(const char *path, bool killing)
{
	int directory = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct found found = {0, 0};

	if (directory < 0)
		return 0;
	(killing ? kill_in : count_in)(directory, 0, &found);
	close(directory);
	return found.others;
}

/* The same cgroup in the hierarchy of another controller of version 1: its own directory beside this one's. */
static bool beside(const char *path, const char *controller, const char *other, char out[MURI_CGROUP_SIZE])
{
	char part[32];
	const char *at;
	int size;

	snprintf(part, sizeof(part), "/%s/", controller);
	at = strstr(path, part);
	if (!at)
		return false;
	size = snprintf(out, MURI_CGROUP_SIZE, "%.*s/%s/%s", (int)(at - path), path, other, at + strlen(part));
	return size > 0 && size < MURI_CGROUP_SIZE;
}

/* Whether a process's environment, as it was at its start, says that it is a task of this job on this node. */
static bool is_task_of(pid_t pid, uint32_t job, const char *node)
{
	char name[PROC_NAME_SIZE], of_job[PROC_NAME_SIZE], on_node[PROC_NAME_SIZE + NAME_MAX], entry[LINK_SIZE];
	bool is_job = false, is_here = false;
	size_t used = 0;
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%ld/environ", (long)pid);
	snprintf(of_job, sizeof(of_job), "SLURM_JOB_ID=%lu", (unsigned long)job);
	/* A shell of salloc's has no node, and several slurmds may share a machine. */
	snprintf(on_node, sizeof(on_node), "SLURMD_NODENAME=%s", node);
	file = fopen(name, "re");
	/* A process can make this file as large as its memory, and root reads it here under the lock. */
	for (size_t left = MOST_ENVIRONMENT; file && left && !(is_job && is_here); left--) {
		int byte = getc(file);

		if (byte == EOF)
			break;
		entry[used < sizeof(entry) ? used++ : sizeof(entry) - 1] = (char)byte;
		if (byte)
			continue;
		is_job |= strcmp(entry, of_job) == 0;
		is_here |= strcmp(entry, on_node) == 0;
		used = 0;
	}
	if (file)
		fclose(file);
	return is_job && is_here;
}

/* Look for a job's tasks among all processes of its user, where no cgroup holds them together. */
static size_t among_all(uint32_t job, uid_t uid, const char *node, bool killing)
{
	DIR *proc = opendir("/proc");
	struct dirent *entry;
	size_t found = 0;

	while (proc && (entry = readdir(proc))) {
		pid_t parent;
		uid_t uids[4];
		uint32_t pid;

		if (!muri_number(entry->d_name, &pid) || !read_status((pid_t)pid, &parent, uids) || uids[0] != uid ||
		    !is_task_of((pid_t)pid, job, node))
			continue;
		found++;
		if (killing)
			kill((pid_t)pid, SIGKILL);
	}
	if (proc)
		closedir(proc);
	return found;
}

size_t muri_processes(const struct muri_grant *grant, const char *node, bool killing)
{
	char freezer[MURI_CGROUP_SIZE];
	size_t found;

	if (!*grant->cgroup)
		return among_all(grant->job, grant->uid, node, killing);
	found = in_directory(grant->cgroup, killing);
	/* What has left the one may be in the other still. */
	if (beside(grant->cgroup, "devices", "freezer", freezer)) {
		size_t there = in_directory(freezer, killing);

		found = there > found ? there : found;
	}
	return found;
}
