// What a run prints and logs about each step, and its pace.
#pragma once
#include <cmath>
#include <string>

#include "run/log.h"
#include "run/settings.h"
#include "run/statistics.h"

// Model FLOPs utilization: the model's FLOP/s as a percentage of the peak of all ranks' GPUs. NaN
// if `peak`, the TFLOP/s of one GPU, is 0 because it is not known.
double mfu_percent(size_t flops_per_token, double tokens_per_second, int ranks, double peak);

class StepReport {
  public:
    struct Machine {
        size_t flops_per_token;
        int ranks;
        double peak;  // TFLOP/s of a GPU, 0 if it is not known
    };
    StepReport(const Options& o, const Machine& machine) : o_(o), machine_(machine) {}

    // A step begins, after `done` others, of which earlier processes have done `done_before`.
    void begin_step(int done, int done_before);

    // The step has ended, which makes `done` steps. Prints it and returns its row of the log.
    Row print_step(int done, const Statistics& statistics);

    double loss() const { return loss_; }  // of the last step
    double tokens_per_second() const;      // over all steps that count for the pace

  private:
    const Options& o_;
    const Machine machine_;
    double loss_ = NAN;
    double step_start_ = 0;  // seconds
    // The first steps of a process do not count for the pace, because they make plans, connections
    // and a CUDA graph. While there are no others, the latest counts.
    static constexpr int kUncountedSteps = 2;
    int counted_from_ = 0;   // steps done when counting started
    int counted_to_ = 0;     // steps done so far
    double pace_start_ = 0;  // for the ETA, which includes what is between steps: validation, …
    double counted_seconds_ = 0;  // for the tokens per second: the time in steps alone
};
