#include "table.h"

#include <stdlib.h>

#include "context.h"
#include "origin.h"

enum { OPTION_MURI = 1, OPTION_NO_MURI = 2 };

struct muri_options muri_given;

void muri_say_refusal(const char *source, const char *text, const struct muri_error *error)
{
	slurm_error("muri: %s%s%s: %s", source, text ? "=" : "", text ? text : "", error->text);
	if (!error->list_keys)
		return;
	slurm_spank_log("muri: valid keys of --muri=key=value,key=value are:");
	for (int i = 0; i < MURI_KEY_COUNT; i++)
		slurm_spank_log("muri:   %-14s %s", muri_keys[i].form, muri_keys[i].help);
}

static enum muri_layer layer_of(const char *name, const char *value)
{
	/* srun and salloc have no script; only the allocator context of sbatch needs the question. */
	if (spank_context() != S_CTX_ALLOCATOR)
		return MURI_COMMAND_LINE;
	return muri_on_command_line(name, value) ? MURI_COMMAND_LINE : MURI_SCRIPT;
}

/*
 * True if Slurm calls back for a variable that it exported itself, not for an option that a user
 * wrote. For a heterogeneous job, sbatch passes the options of the previous component this way,
 * with the text "(null)" for an option without a value.
 */
static bool is_exported(const char *text, const char *variable)
{
	return text && text == getenv(variable);
}

static int on_muri(int value, const char *text, int remote)
{
	struct muri_error error;

	(void)value;
	/* In slurmstepd the mark is read from the environment; see remote.c. */
	if (remote || is_exported(text, MURI_EXPORTED))
		return 0;
	if (muri_options_want(&muri_given, layer_of("muri", text), text, &error) == 0)
		return 0;
	muri_say_refusal("--muri", text, &error);
	return -1;
}

static int on_no_muri(int value, const char *text, int remote)
{
	struct muri_error error;

	(void)value;
	if (remote || is_exported(text, MURI_EXPORTED_NO))
		return 0;
	if (muri_options_refuse(&muri_given, layer_of("no-muri", NULL), &error) == 0)
		return 0;
	muri_say_refusal("--no-muri", NULL, &error);
	return -1;
}

static struct spank_option table[] = {
	{
		.name = "muri",
		.arginfo = "[key=value,...]",
		.usage = "let Muri share the job's GPUs with other training jobs. Keys: " MURI_KEYS_HELP ". "
			 "sbatch also reads SBATCH_MURI=1 or SBATCH_MURI=key=value,...",
		.has_arg = 2,
		.val = OPTION_MURI,
		.cb = on_muri,
	},
	{
		.name = "no-muri",
		.usage = "submit an ordinary job, whatever the script or SBATCH_MURI says",
		.has_arg = 0,
		.val = OPTION_NO_MURI,
		.cb = on_no_muri,
	},
};

int muri_register_options(spank_t spank)
{
	static bool done;

	if (done)
		return 0;
	done = true;
	muri_options_clear(&muri_given);
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		spank_err_t failure = spank_option_register(spank, &table[i]);

		if (failure != ESPANK_SUCCESS) {
			slurm_error("muri: cannot register --%s: %s", table[i].name, spank_strerror(failure));
			return -1;
		}
	}
	return 0;
}
