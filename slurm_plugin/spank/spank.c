/*
 * Entry points of the SPANK plugin: sbatch --muri, salloc --muri, srun --muri.
 * The plugin never fails a job. It refuses only a mistake in the user's own option, at submit.
 */
#include "context.h"

#define PUBLIC __attribute__((visibility("default")))

#pragma GCC visibility push(default)
SPANK_PLUGIN(muri, 1)
#pragma GCC visibility pop

static void check_arguments(int count, char *arguments[])
{
	for (int i = 0; i < count; i++)
		slurm_error("muri: plugstack.conf: unknown argument \"%s\" ignored; the plugin takes none", arguments[i]);
}

PUBLIC int slurm_spank_init(spank_t spank, int count, char *arguments[])
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
		check_arguments(count, arguments);
		return muri_client_init(spank);
	case S_CTX_REMOTE:
		return muri_remote_init(spank);
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
	return spank_context() == S_CTX_REMOTE ? muri_remote_user_init(spank) : 0;
}
