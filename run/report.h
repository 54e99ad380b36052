// What a run prints and logs of each step, and its pace.
#pragma once
#include <string>

#include "run/log.h"
#include "run/settings.h"
#include "run/statistics.h"

// The share of all ranks' GPUs, with a peak of so many TFLOP/s each. NaN if the peak is not known.
double mfu_percent(size_t flops_per_token, double tokens_per_second, int ranks, double peak);

class StepReport {
  public:
    struct Machine {
        size_t flops_per_token;
        int ranks;
        double peak;  // TFLOP/s of a GPU, 0 if it is not known
    };
    StepReport(const Options& o, const Machine& machine) : o_(o), machine_(machine) {}

    // A step begins, after `done` others. `first` of them were made by an earlier process.
    void restart_timer(int done, int first);

    // The step has ended, and with it `done` steps are. Prints it and returns its row of the log.
    Row step(int done, const Statistics& statistics);

    double loss() const { return loss_; }  // of the last step
    double tokens_per_second() const;      // of the steps that count for the pace

  private:
    const Options& o_;
    const Machine machine_;
    double loss_ = NAN;
    double step_began_ = 0;
    // The pace is that of the steps after the second, because the first two make plans, connections
    // and a CUDA graph.
    int paced_from_ = 0;
    int paced_to_ = 0;
    double pace_began_ = 0;
    double paced_seconds_ = 0;  // in steps, without validations and the like between them
};
