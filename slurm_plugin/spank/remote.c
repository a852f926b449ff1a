/* slurmstepd: make the user's run directory, hand the mark to the batch script and to every task. */
#include "context.h"
#include "request.h"
#include "run_dir.h"
#include "table.h"

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

int muri_remote_init(spank_t spank)
{
	/*
	 * For every job: a pilot job has no mark, and what a job's environment says is its user's word.
	 * Slurm still runs this as root.
	 */
	make_run_dir(spank);
	return muri_register_options(spank);
}

int muri_remote_user_init(spank_t spank)
{
	char canonical[MURI_CANONICAL_SIZE];

	if (spank_getenv(spank, MURI_CARRIER, canonical, sizeof(canonical)) != ESPANK_SUCCESS)
		return 0;
	if (!muri_is_canonical(canonical)) {
		slurm_info("muri: %s does not hold a mark of Muri; ignored", MURI_CARRIER);
		return 0;
	}
	if (spank_setenv(spank, MURI_JOB_VARIABLE, canonical, 1) != ESPANK_SUCCESS)
		slurm_info("muri: cannot set %s in the job's environment", MURI_JOB_VARIABLE);
	return 0;
}
