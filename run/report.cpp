#include "run/report.h"

#include <cmath>
#include <cstdio>

double mfu_percent(size_t flops_per_token, double tokens_per_second, int ranks, double peak) {
    return peak > 0 ? 100 * tokens_per_second * flops_per_token / (ranks * peak * 1e12) : NAN;
}

void StepReport::begin_step(int done, int done_before) {
    step_start_ = now();
    if (done <= done_before + kUncountedSteps) {  // forgets the steps so far
        counted_from_ = done;
        pace_start_ = step_start_;
        counted_seconds_ = 0;
    }
}

Row StepReport::print_step(int done, const Statistics& statistics) {
    const double lr = o_.learning_rate(done - 1);
    const double seconds = now() - step_start_;
    const double tok_s = o_.tokens_per_step / seconds;
    const double mfu = mfu_percent(machine_.flops_per_token, tok_s, machine_.ranks, machine_.peak);
    loss_ = statistics.loss;
    counted_to_ = done;
    counted_seconds_ += seconds;

    const double seconds_per_step = (now() - pace_start_) / (done - counted_from_);
    const double eta = (o_.max_steps - done) * seconds_per_step;
    std::printf(
        "step %d/%d | loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU %s | ETA %s\n",
        done, o_.max_steps, loss_, statistics.norm, lr, seconds * 1e3, tok_s,
        machine_.peak > 0 ? format("%.1f%%", mfu).c_str() : "n/a", minutes(eta).c_str());

    Row row("train");
    row.add("step", done).add("loss_nats", loss_).add("grad_norm", statistics.norm).add("lr", lr);
    row.add("step_ms", seconds * 1e3).add("tokens_per_s", tok_s).add("mfu_percent", mfu);
    return row;
}

double StepReport::tokens_per_second() const {
    return o_.tokens_per_step * double(counted_to_ - counted_from_) / counted_seconds_;
}
