/* The directory in which the jobs of one user and their group's runtime meet on a node. */
#ifndef MURI_RUN_DIR_H
#define MURI_RUN_DIR_H

#include <stddef.h>
#include <sys/types.h>

#define MURI_RUN_PARENT "/run"

/*
 * Make `parent`/muri, which all users may enter and only this process's user may write, and in it a directory named
 * like the user's id that only that user can enter. No link is followed, and nothing that belongs to another user is
 * touched. Calling it again, also at the same time, is fine.
 * Returns 0, or -1 with a sentence in `error`.
 */
int muri_make_run_dir(const char *parent, uid_t uid, gid_t gid, char *error, size_t error_size);

#endif
