/* slurmstepd: hand the mark to the batch script and to every task. */
#include "context.h"
#include "request.h"
#include "table.h"

int muri_remote_init(spank_t spank)
{
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
