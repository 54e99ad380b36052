// Where a run's data comes from.
#pragma once
#include <cmath>
#include <future>

#include "data/loader.h"
#include "run/settings.h"

struct Data {
    Source train = {};
    Source val = {};
    // The validation data's entropy in nats per token, below which no model's loss can get. NaN if
    // it is not known.
    double floor = NAN;
};

// The data that -i and -j name, or the built-in corpus.
Data find_data(const Options& o);

// Starts to make the built-in corpus in a thread, if a run with these options needs it. find_data()
// waits for it.
std::future<void> begin_corpus(const Options& o);
