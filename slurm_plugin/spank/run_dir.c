/* Makes a user's run directory as root, at a place where others cannot prepare anything. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "muri.h"

#define ALL_PERMISSIONS 07777

static int refuse(char *error, size_t size, const char *name, const char *why)
{
	snprintf(error, size, "cannot make the run directory %s: %s", name, why);
	return -1;
}

/* Open a directory below `parent`, made when it is missing. Returns its descriptor, or -1. */
static int open_made(int parent, const char *name)
{
	if (mkdirat(parent, name, 0700) && errno != EEXIST)
		return -1;
	return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Give an open directory these permissions; leaves alone what has them. */
static int permit(int directory, const struct stat *facts, mode_t mode)
{
	return (facts->st_mode & ALL_PERMISSIONS) == mode ? 0 : fchmod(directory, mode);
}

static bool is_own(const struct stat *facts)
{
	return facts->st_uid == geteuid();
}

static int make_shared(int shared, char *error, size_t size)
{
	struct stat facts;

	if (fstat(shared, &facts))
		return refuse(error, size, "muri", strerror(errno));
	if (!is_own(&facts))
		return refuse(error, size, "muri", "it belongs to another user");
	if (permit(shared, &facts, 0755))
		return refuse(error, size, "muri", strerror(errno));
	return 0;
}

static int give(int directory, const char *name, uid_t uid, gid_t gid, char *error, size_t size)
{
	struct stat facts;

	if (fstat(directory, &facts))
		return refuse(error, size, name, strerror(errno));
	/* Its own until it is given away, by this process or by another that starts a job of this user. */
	if (facts.st_uid != uid && !is_own(&facts))
		return refuse(error, size, name, "it belongs to another user");
	if (permit(directory, &facts, 0700) || (facts.st_uid != uid && fchown(directory, uid, gid)))
		return refuse(error, size, name, strerror(errno));
	return 0;
}

static int make_below(int shared, uid_t uid, gid_t gid, char *error, size_t size)
{
	char name[32];
	int directory, failure;

	snprintf(name, sizeof(name), "%lu", (unsigned long)uid);
	directory = open_made(shared, name);
	if (directory < 0)
		return refuse(error, size, name, strerror(errno));
	failure = give(directory, name, uid, gid, error, size);
	close(directory);
	return failure;
}

int muri_make_run_dir(const char *parent, uid_t uid, gid_t gid, char *error, size_t error_size)
{
	int top = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int shared, failure;

	if (top < 0)
		return refuse(error, error_size, parent, strerror(errno));
	shared = open_made(top, "muri");
	close(top);
	if (shared < 0)
		return refuse(error, error_size, "muri", strerror(errno));
	failure = make_shared(shared, error, error_size);
	if (!failure)
		failure = make_below(shared, uid, gid, error, error_size);
	close(shared);
	return failure;
}
