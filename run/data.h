// Where a run's data comes from.
#pragma once
#include <cmath>
#include <future>

#include "data/loader.h"
#include "run/settings.h"

struct Data {
    Source train;
    Source val;
    // nats per token of the validation data: no model can beat that. NaN if it is not known
    double floor = NAN;
};

// What -i and -j name, or the built-in corpus.
Data find_data(const Options& o);

// Begins to make the built-in corpus in a thread, if a run with these options needs it. find_data()
// waits for it.
std::future<void> begin_corpus(const Options& o);
