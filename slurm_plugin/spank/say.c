#include "say.h"

#include <slurm/spank.h>

#include "keys.h"

void muri_say_refusal(const char *source, const char *text, const struct muri_error *error)
{
	slurm_error("muri: %s%s%s: %s", source, text ? "=" : "", text ? text : "", error->text);
	if (!error->list_keys)
		return;
	slurm_spank_log("muri: valid keys of --muri=key=value,key=value are:");
	for (const struct muri_key *key = muri_keys; key->name; key++)
		slurm_spank_log("muri:   %-14s %s", key->form, key->meaning);
}
