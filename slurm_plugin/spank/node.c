/* What root notes about jobs on this node, at a place where others cannot write anything. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "muri.h"

#define LOCK_NAME "lock"
#define NEW_NAME ".new"
#define GRANT_NAME "grant-"
#define PLACES_NAME "places-"
#define GATE_LICENSE "license"
#define GATE_HOLD "hold"

#ifndef LOCK_MS
#define LOCK_MS 20000	/* others hold it for milliseconds, and this long only where the kernel keeps them from ending */
#endif

enum {
	NAME_SIZE = 32,	/* grant-, job- or places- with a number */
	LOCK_LOOK_MS = 5,
	TEXT_SIZE = MURI_CGROUP_SIZE + MURI_GPUS_SIZE + MURI_VARIABLES_SIZE + MURI_MIG_SIZE + 512,
};

static int refuse(char *error, size_t size, const char *name, const char *why)
{
	snprintf(error, size, "cannot use the directory %s: %s", name, why);
	return -1;
}

/* A name that stays in its directory: Slurm's node names are host names. */
static bool is_node_name(const char *name)
{
	size_t length = name ? strlen(name) : 0;

	return length && length < 256 && name[0] != '.' && !strchr(name, '/');
}

/* Enter a directory below `parent`, made when it is missing, and close `parent`. Only this user may write in it. */
static int enter(int parent, const char *name, char *error, size_t size)
{
	int directory = -1, failure = 0;
	struct stat facts;

	if (mkdirat(parent, name, 0755) == 0 || errno == EEXIST)
		directory = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory < 0 || fstat(directory, &facts))
		failure = refuse(error, size, name, strerror(errno));
	else if (facts.st_uid != geteuid())
		failure = refuse(error, size, name, "it belongs to another user");
	else if ((facts.st_mode & 07777) != 0755 && fchmod(directory, 0755))	/* made under another umask */
		failure = refuse(error, size, name, strerror(errno));
	close(parent);
	if (failure && directory >= 0)
		close(directory);
	return failure ? -1 : directory;
}

int muri_node_dir(const char *parent, const char *node, char *error, size_t size)
{
	int directory = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (directory < 0)
		return refuse(error, size, parent, strerror(errno));
	if (!is_node_name(node)) {
		close(directory);
		return refuse(error, size, "of this node", "slurmd has not said the node's name");
	}
	directory = enter(directory, "muri", error, size);
	if (directory >= 0)
		directory = enter(directory, "node", error, size);
	return directory < 0 ? -1 : enter(directory, node, error, size);
}

int64_t muri_now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool muri_write_word(int directory, const char *name, const char *word)
{
	int file = openat(directory, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
	bool done = file >= 0 && write(file, word, strlen(word)) == (ssize_t)strlen(word);

	if (file >= 0)
		close(file);
	return done;
}

int muri_node_lock(int node)
{
	int lock = openat(node, LOCK_NAME, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);

	for (int waited = 0; lock >= 0 && flock(lock, LOCK_EX | LOCK_NB); waited += LOCK_LOOK_MS) {
		if ((errno != EWOULDBLOCK && errno != EINTR) || waited >= LOCK_MS) {
			close(lock);
			return -1;
		}
		poll(NULL, 0, LOCK_LOOK_MS);
	}
	return lock;
}

static void name_file(char name[NAME_SIZE], const char *kind, uint32_t job)
{
	snprintf(name, NAME_SIZE, "%s%lu", kind, (unsigned long)job);
}

static int write_all(int file, const char *text, size_t size)
{
	while (size) {
		ssize_t written = write(file, text, size);

		if (written < 0 && errno != EINTR)
			return -1;
		if (written > 0) {
			text += written;
			size -= (size_t)written;
		}
	}
	return 0;
}

/* Put a file in place of another at once, whatever ends this process. */
static int put(int node, const char *name, const char *text)
{
	int file, failure;

	if (unlinkat(node, NEW_NAME, 0) && errno != ENOENT)
		return -1;
	file = openat(node, NEW_NAME, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
	if (file < 0)
		return -1;
	failure = write_all(file, text, strlen(text));
	if (close(file))
		failure = -1;
	return failure ? -1 : renameat(node, NEW_NAME, node, name);
}

static int take_away(int node, const char *name)
{
	return unlinkat(node, name, 0) && errno != ENOENT ? -1 : 0;
}

/* Read a file of this user. A longer file must be another's. */
static int get(int node, const char *name, char text[TEXT_SIZE])
{
	int file = openat(node, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	size_t size = 0;
	struct stat facts;
	ssize_t part = 1;

	if (file < 0)
		return -1;
	if (fstat(file, &facts) || !S_ISREG(facts.st_mode) || facts.st_uid != geteuid()) {
		close(file);
		errno = EPERM;
		return -1;
	}
	while (part && size < TEXT_SIZE) {
		part = read(file, text + size, TEXT_SIZE - size);
		if (part < 0 && errno != EINTR)
			break;
		size += part > 0 ? (size_t)part : 0;
	}
	close(file);
	if (part || memchr(text, '\0', size)) {
		errno = EINVAL;
		return -1;
	}
	text[size] = '\0';
	return 0;
}

/* Copy the value of a line key=value; false where there is none or it does not fit. */
static bool value_of(const char *text, const char *key, char *out, size_t size)
{
	size_t length = strlen(key);

	while (text) {
		const char *end = strchr(text, '\n');

		if (!end)
			return false;	/* every line has its end */
		if (strncmp(text, key, length) == 0 && text[length] == '=') {
			size_t taken = (size_t)(end - text) - length - 1;

			if (taken >= size)
				return false;
			memcpy(out, text + length + 1, taken);
			out[taken] = '\0';
			return true;
		}
		text = end + 1;
	}
	return false;
}

bool muri_number(const char *text, uint32_t *number)
{
	uint64_t value = 0;
	const char *digit = text;

	for (; *digit >= '0' && *digit <= '9' && value <= UINT32_MAX; digit++)
		value = value * 10 + (uint64_t)(*digit - '0');
	if (digit == text || *digit || value > UINT32_MAX)
		return false;
	*number = (uint32_t)value;
	return true;
}

bool muri_is_sluid(const char *word, size_t length)
{
	if (length < 10 || length >= MURI_SLUID_SIZE || word[0] != 's')
		return false;
	for (size_t i = 1; i < length; i++)
		if (!((word[i] >= '0' && word[i] <= '9') || (word[i] >= 'A' && word[i] <= 'Z')))
			return false;
	return true;
}

static bool number_of(const char *text, const char *key, uint32_t *number)
{
	char value[16];

	return value_of(text, key, value, sizeof(value)) && muri_number(value, number);
}

static int not_a_line(void)
{
	errno = EINVAL;
	return -1;
}

/* Add a line, unless its value is empty. There is room for all of them. */
static void add_line(char text[TEXT_SIZE], size_t *length, const char *key, const char *value)
{
	if (*value)
		*length += (size_t)snprintf(text + *length, TEXT_SIZE - *length, "%s=%s\n", key, value);
}

int muri_job_write(int node, const struct muri_job *job)
{
	char name[NAME_SIZE], text[TEXT_SIZE];
	size_t length;

	if (strchr(job->gpus, '\n') || strchr(job->variables, '\n') || strchr(job->mig, '\n') ||
	    strchr(job->sluid, '\n'))
		return not_a_line();
	length = (size_t)snprintf(text, sizeof(text), "uid=%lu\ngpus=%s\n", (unsigned long)job->uid, job->gpus);
	add_line(text, &length, "sluid", job->sluid);
	add_line(text, &length, "variables", job->variables);
	add_line(text, &length, "mig", job->mig);
	name_file(name, "job-", job->id);
	return put(node, name, text);
}

/* Read a line that may be missing: its value is empty then. */
static void read_line(const char *text, const char *key, char *out, size_t size)
{
	if (!value_of(text, key, out, size))
		out[0] = '\0';
}

int muri_job_read(int node, uint32_t id, struct muri_job *job)
{
	char name[NAME_SIZE], text[TEXT_SIZE];
	uint32_t uid;

	name_file(name, "job-", id);
	if (get(node, name, text))
		return -1;
	if (!number_of(text, "uid", &uid) || !value_of(text, "gpus", job->gpus, sizeof(job->gpus)))
		return not_a_line();
	job->id = id;
	job->uid = (uid_t)uid;
	read_line(text, "sluid", job->sluid, sizeof(job->sluid));
	read_line(text, "variables", job->variables, sizeof(job->variables));
	read_line(text, "mig", job->mig, sizeof(job->mig));
	return 0;
}

int muri_job_remove(int node, uint32_t id)
{
	char name[NAME_SIZE];

	name_file(name, "job-", id);
	return take_away(node, name);
}

int muri_grant_write(int node, const struct muri_grant *grant)
{
	char name[NAME_SIZE], text[TEXT_SIZE];

	if (strchr(grant->cgroup, '\n'))
		return not_a_line();
	snprintf(text, sizeof(text), "pilot=%lu\nuid=%lu\nrun=%lu\ngate=%s\ncgroup=%s\n", (unsigned long)grant->pilot,
		 (unsigned long)grant->uid, (unsigned long)grant->run, grant->license ? GATE_LICENSE : GATE_HOLD, grant->cgroup);
	name_file(name, GRANT_NAME, grant->job);
	return put(node, name, text);
}

int muri_grant_read(int node, uint32_t job, struct muri_grant *grant)
{
	char name[NAME_SIZE], text[TEXT_SIZE], gate[16];
	uint32_t uid;

	name_file(name, GRANT_NAME, job);
	if (get(node, name, text))
		return -1;
	if (!number_of(text, "pilot", &grant->pilot) || !number_of(text, "uid", &uid) ||
	    !number_of(text, "run", &grant->run) || !value_of(text, "gate", gate, sizeof(gate)) ||
	    !value_of(text, "cgroup", grant->cgroup, sizeof(grant->cgroup)))
		return not_a_line();
	grant->job = job;
	grant->uid = (uid_t)uid;
	grant->license = strcmp(gate, GATE_LICENSE) == 0;
	return 0;
}

int muri_grant_remove(int node, uint32_t job)
{
	char name[NAME_SIZE];

	name_file(name, PLACES_NAME, job);
	take_away(node, name);
	name_file(name, GRANT_NAME, job);
	return take_away(node, name);
}

/* Each byte of the file stands for a GPU. A process's locks end with it, and its children do not have them. */
int muri_take_places(int node, uint32_t job, size_t gpus, size_t count, size_t *first)
{
	char name[NAME_SIZE];
	int file;

	name_file(name, PLACES_NAME, job);
	file = openat(node, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	for (size_t at = 0; file >= 0 && at + count <= gpus; at++) {
		struct flock bytes = {
			.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)at, .l_len = (off_t)count,
		};

		if (fcntl(file, F_SETLK, &bytes))
			continue;
		*first = at;
		return file;
	}
	if (file >= 0)
		close(file);
	return -1;
}

/* The job whose grant an entry of the directory is. */
static bool is_grant(const char *name, uint32_t *job)
{
	size_t length = strlen(GRANT_NAME);

	return strncmp(name, GRANT_NAME, length) == 0 && muri_number(name + length, job);
}

ssize_t muri_grants_of(int node, uint32_t pilot, uint32_t *jobs, size_t most)
{
	int copy = openat(node, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = copy < 0 ? NULL : fdopendir(copy);
	struct muri_grant grant;
	struct dirent *entry;
	bool failed = false;
	size_t count = 0;
	uint32_t job;

	if (!directory) {
		if (copy >= 0)
			close(copy);
		return -1;
	}
	while (!failed && count < most && (entry = readdir(directory))) {
		if (!is_grant(entry->d_name, &job))
			continue;
		if (muri_grant_read(node, job, &grant) == 0) {
			if (!pilot || grant.pilot == pilot)
				jobs[count++] = job;
		} else {
			failed = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EIO;	/* it may be one */
		}
	}
	closedir(directory);
	return failed ? -1 : (ssize_t)count;
}
