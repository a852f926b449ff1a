#include "request.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void muri_request_clear(struct muri_request *request)
{
	*request = (struct muri_request){.checkpoint = MURI_UNSET, .alone = MURI_UNSET};
}

static void append(char *out, size_t size, const char *item)
{
	size_t used = strlen(out);

	snprintf(out + used, size - used, "%s%s", used ? "," : "", item);
}

void muri_request_canonical(const struct muri_request *request, char *out, size_t size)
{
	char item[MURI_MODEL_MAX + 32];

	out[0] = '\0';
	if (request->model[0]) {
		snprintf(item, sizeof(item), "model=%s", request->model);
		append(out, size, item);
	}
	if (request->batch_size) {
		snprintf(item, sizeof(item), "batch-size=%lld", request->batch_size);
		append(out, size, item);
	}
	if (request->duration_s) {
		snprintf(item, sizeof(item), "duration=%lld", request->duration_s);
		append(out, size, item);
	}
	if (request->checkpoint == MURI_YES)
		append(out, size, "checkpoint=1");
	if (request->alone == MURI_YES)
		append(out, size, "alone=1");
	if (request->accumulate) {
		snprintf(item, sizeof(item), "accumulate=%lld", request->accumulate);
		append(out, size, item);
	}
	if (!out[0])
		snprintf(out, size, "on");
}

void muri_request_overlay(struct muri_request *base, const struct muri_request *over)
{
	if (over->model[0])
		memcpy(base->model, over->model, sizeof(base->model));
	if (over->batch_size)
		base->batch_size = over->batch_size;
	if (over->duration_s)
		base->duration_s = over->duration_s;
	if (over->checkpoint != MURI_UNSET)
		base->checkpoint = over->checkpoint;
	if (over->alone != MURI_UNSET)
		base->alone = over->alone;
	if (over->accumulate)
		base->accumulate = over->accumulate;
}

bool muri_is_canonical(const char *text)
{
	static const char alphabet[] = "abcdefghijklmnopqrstuvwxyz"
				       "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
				       "0123456789._+/=,-";
	size_t length = strlen(text);

	return length > 0 && length < MURI_CANONICAL_MAX && strspn(text, alphabet) == length;
}

int muri_fail(struct muri_error *error, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(error->text, sizeof(error->text), format, arguments);
	va_end(arguments);
	return -1;
}
