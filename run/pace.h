// How fast a run goes, and when it will end. Times are in seconds.
#pragma once
#include <algorithm>

#include "run/settings.h"

inline std::string minutes(double seconds) {  // 83 → "1:23"
    if (seconds > 99 * 86400.) return "> 99 days";
    return format("%d:%02d", static_cast<int>(seconds / 60), static_cast<int>(seconds) % 60);
}

struct Pace {
    int steps = -2;  // that count, because the first two make plans, connections and a CUDA graph
    double sum = 0, step = 0, val = 0, sample = 0, save = 0;  // all steps, a step of late, and the last of the others

    void add_step(double time) {
        steps++;
        sum = steps > 1 ? sum + time : time;
        step = steps > 1 ? step + (time - step) * std::max(1. / steps, 0.05) : time;
    }
    // The time left at the end of step `done` of so many sequences. A token of the first sample is taken for one
    // sequence's forward, which is a third of its share of a step.
    double left(int done, const Options& o, int sequences) const {
        const auto times = [&](int every) {
            return every > 0 ? (o.max_steps - 1) / every - (done - 1) / every + 1 : 0;
        };
        return (o.max_steps - done) * step + times(o.val_every) * val + times(o.checkpoint_every) * save +
               times(o.sample_every) * (sample > 0 ? sample : o.sample_length * step / (3. * sequences));
    }
};
