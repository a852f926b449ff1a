#include "options.h"

#include <string.h>

void muri_options_clear(struct muri_options *options)
{
	memset(options, 0, sizeof(*options));
}

static int contradiction(struct muri_error *error)
{
	error->list_keys = false;
	return muri_fail(error, "--muri and --no-muri contradict each other; keep one");
}

int muri_options_want(struct muri_options *options, enum muri_layer layer, const char *text,
		      struct muri_error *error)
{
	if (options->layer[layer].refused)
		return contradiction(error);
	if (muri_request_parse(text, &options->layer[layer].request, error))
		return -1;
	options->layer[layer].wanted = true;
	return 0;
}

int muri_options_refuse(struct muri_options *options, enum muri_layer layer, struct muri_error *error)
{
	if (options->layer[layer].wanted)
		return contradiction(error);
	options->layer[layer].refused = true;
	return 0;
}

bool muri_options_result(const struct muri_options *options, struct muri_request *out)
{
	bool wanted = false;

	muri_request_clear(out);
	for (int i = 0; i < MURI_LAYERS; i++) {
		if (options->layer[i].refused) {
			wanted = false;
			muri_request_clear(out);
		}
		if (options->layer[i].wanted) {
			wanted = true;
			muri_request_overlay(out, &options->layer[i].request);
		}
	}
	return wanted;
}

bool muri_options_given(const struct muri_options *options)
{
	for (int i = 0; i < MURI_LAYERS; i++)
		if (options->layer[i].wanted || options->layer[i].refused)
			return true;
	return false;
}
