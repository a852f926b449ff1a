/*
 * Entry points of the SPANK plugin: sbatch --muri, salloc --muri, srun --muri.
 * The plugin never fails a job. It refuses only a mistake in the user's own option, at submit.
 */
#include "context.h"
#include "muri.h"

#define PUBLIC __attribute__((visibility("default")))

#pragma GCC visibility push(default)
SPANK_PLUGIN(muri, 1)
#pragma GCC visibility pop

static void check_arguments(int count, char *arguments[])
{
	for (int i = 0; i < count; i++)
		slurm_error("muri: plugstack.conf: unknown argument \"%s\" ignored; the plugin takes none", arguments[i]);
}

/* Without the directory members of a group meet in /tmp, so a failure is not the job's. */
static void make_run_dir(spank_t spank)
{
	char error[256];
	uid_t uid;
	gid_t gid;

	if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_GID, &gid) != ESPANK_SUCCESS)
		return;
	if (muri_make_run_dir(MURI_RUN_PARENT, uid, gid, error, sizeof(error)))
		slurm_info("muri: %s in %s", error, MURI_RUN_PARENT);
}

static int remote_init(spank_t spank)
{
	/* As root, and for every job: a pilot job has no mark, and a job's environment is its user's to write. */
	make_run_dir(spank);
	return muri_register_options(spank);
}

static int remote_user_init(spank_t spank)
{
	char mark[MURI_TEXTS_SIZE];

	if (spank_getenv(spank, MURI_CARRIER, mark, sizeof(mark)) != ESPANK_SUCCESS)
		return 0;
	if (!muri_is_mark(mark)) {
		slurm_info("muri: %s does not hold a mark of Muri; ignored", MURI_CARRIER);
		return 0;
	}
	if (spank_setenv(spank, MURI_JOB_VARIABLE, mark, 1) != ESPANK_SUCCESS)
		slurm_info("muri: cannot set %s in the job's environment", MURI_JOB_VARIABLE);
	return 0;
}

PUBLIC int slurm_spank_init(spank_t spank, int count, char *arguments[])
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
		check_arguments(count, arguments);
		return muri_client_init(spank);
	case S_CTX_REMOTE:
		return remote_init(spank);
	default:
		return 0;
	}
}

PUBLIC int slurm_spank_init_post_opt(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		return muri_allocator_post_options(spank);
	case S_CTX_LOCAL:
		return muri_local_post_options(spank);
	default:
		return 0;
	}
}

PUBLIC int slurm_spank_user_init(spank_t spank, int count, char *arguments[])
{
	(void)count;
	(void)arguments;
	return spank_context() == S_CTX_REMOTE ? remote_user_init(spank) : 0;
}
