/* Collects --muri and --no-muri from every place a user can write them. */
#ifndef MURI_OPTIONS_H
#define MURI_OPTIONS_H

#include "request.h"

/* Where an option was written. A later layer overrides an earlier one, as for sbatch's own options. */
enum muri_layer { MURI_SCRIPT, MURI_ENVIRONMENT, MURI_COMMAND_LINE, MURI_LAYERS };

struct muri_options {
	struct {
		struct muri_request request;
		bool wanted;	/* --muri */
		bool refused;	/* --no-muri */
	} layer[MURI_LAYERS];
};

void muri_options_clear(struct muri_options *options);

/* Note a --muri[=text] in a layer. Returns 0, or -1 with the error filled in. */
int muri_options_want(struct muri_options *options, enum muri_layer layer, const char *text,
		      struct muri_error *error);

/* Note a --no-muri in a layer. Returns 0, or -1 with the error filled in. */
int muri_options_refuse(struct muri_options *options, enum muri_layer layer, struct muri_error *error);

/* True if the user wants Muri for the job; `out` is then the request of all layers together. */
bool muri_options_result(const struct muri_options *options, struct muri_request *out);

/* True if --muri or --no-muri stands in any layer. */
bool muri_options_given(const struct muri_options *options);

#endif
