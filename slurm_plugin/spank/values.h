/* Readers for the value of one key. Each returns 0, or -1 with the error filled in. */
#ifndef MURI_VALUES_H
#define MURI_VALUES_H

#include "request.h"

int muri_read_model(const char *value, struct muri_request *into, struct muri_error *error);
int muri_read_batch_size(const char *value, struct muri_request *into, struct muri_error *error);
int muri_read_duration(const char *value, struct muri_request *into, struct muri_error *error);
int muri_read_accumulate(const char *value, struct muri_request *into, struct muri_error *error);
int muri_read_checkpoint(const char *value, struct muri_request *into, struct muri_error *error);
int muri_read_alone(const char *value, struct muri_request *into, struct muri_error *error);

/* 1 for 1/yes/on/true, 0 for 0/no/off/false, -1 for anything else; case does not matter. */
int muri_truth(const char *value);

/* Seconds in a Slurm time or a number with a unit; -1 if malformed or not positive. */
long long muri_seconds(const char *value);

#endif
