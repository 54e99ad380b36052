// A run's checkpoints. Training waits only for a snapshot in rank 0's host memory, from which a
// thread writes the files while training goes on. run/checkpoint_files.h has their formats.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "run/batches.h"
#include "run/checkpoint_files.h"
#include "run/log.h"
#include "run/memory.h"
#include "run/optimizer_state.h"
#include "run/output_dir.h"
#include "run/settings.h"
#include "run/stop.h"
#include "run/weights.h"

template <class Model>
class Checkpoints {
  public:
    using X = typename Model::X;

    Checkpoints(const Options& o, Model& model, Batches<Model>& batches, Stop<Model>& stop,
                Log& log)
        : o_(o), model_(model), ranks_(model.ranks), batches_(batches), stop_(stop), log_(log) {
        const size_t bytes = o.output_dir.empty() ? 0 : snapshot_bytes(model);
        if (bytes > 0)
            snapshot_ = static_cast<char*>(model.dev.alloc_host(bytes));
        const Config& c = model.config;
        const char* const order =
            o.overfit ? "one batch" : (o.no_shuffle ? "as it is" : "shuffled");
        identity_.fields = {{"model", format("L=%d NH=%d C=%d V=%d", c.L, c.NH, c.C, c.V)},
                            {"precision", name_of(dtype_of<X>())},
                            {"device", Model::Dev::kind},
                            {"B", std::to_string(o.B)},
                            {"T", std::to_string(o.T)},
                            {"tokens per step", std::to_string(o.tokens_per_step)},
                            {"seed", std::to_string(o.seed)},
                            {"order of data", order},
                            {"attention", o.attention},
                            {"matmuls", model.tf32() ? "TF32" : "full precision"},
                            {"data", hex(batches.loader().identity())}};
    }
    ~Checkpoints() {
        if (writer_.valid())
            writer_.wait();  // when an Error unwinds
        model_.dev.free_host(snapshot_);
    }
    Checkpoints(const Checkpoints&) = delete;
    Checkpoints& operator=(const Checkpoints&) = delete;

    // Removes from the output directory what a killed run left, and the checkpoints that are not to
    // be kept.
    void clean_up(OutputDir& output) {
        output_ = &output;
        remove_leftovers(o_.output_dir);
        prune_checkpoints(o_.output_dir, o_.keep, o_.keep_every);
    }

    // Notices without waiting that the writer has finished, or failed.
    void poll() {
        if (!writer_.valid())
            return;
        if (writer_.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
            finish_writing();
    }

    // Waits for the writer. All ranks call this together.
    void wait() {
        ranks_.set_timeout(0);  // rank 0's disk may take its time
        if (writer_.valid())
            finish_writing();
        // In the broadcast the other ranks wait for rank 0's disk. Rank 0 waits only for them, so
        // its timeout applies again.
        if (ranks_.rank == 0)
            ranks_.set_timeout(o_.timeout);
        saved_step_ = ranks_.broadcast(saved_step_);
        ranks_.set_timeout(o_.timeout);
    }

    void save_if_due(int step) {
        if (o_.checkpoint_every && step % o_.checkpoint_every == 0 && !stop_.failed())
            save(step);
    }

    // The last checkpoint of the run. It is also written after an error, because the parameters are
    // good. If writing fails, it is tried once more.
    void save_at_the_end(int step) {
        if (o_.output_dir.empty() || step == 0)
            return;
        wait();
        for (int tries = 0; tries < 2 && saved_step_ != step; tries++) {
            save(step);
            wait();
        }
    }

    // Restores the model and the position in the data from the newest checkpoint. Returns its step,
    // or -1 if there is none. Rank 0 reads for all ranks, because other machines need not have the
    // directory.
    int restore() {
        ranks_.set_timeout(0);  // a disk may take its time
        int newest = -1;
        if (ranks_.rank == 0)
            newest = checkpoint_to_resume(o_.output_dir);
        newest = ranks_.broadcast(newest);
        if (newest >= 0)
            restore(newest);
        ranks_.set_timeout(o_.first_timeout());
        return newest;
    }

    // What to say if training cannot continue.
    std::string last_good() const {
        const std::string path = saved_step_ < 0 ? "none" : model_path(o_.output_dir, saved_step_);
        return "last good checkpoint: " + path + "; try a lower -l or a longer -u";
    }

  private:
    static constexpr char kRemove[] =
        "remove it and its training state to resume from the previous checkpoint";

    // Training waits for the snapshot and, if the previous checkpoint is still being written, for
    // that.
    void save(int step) {
        Range range("checkpoint");
        wait();
        check_parameters(model_, format("step %d: no checkpoint is written", step), last_good());
        const auto& dev = model_.dev;
        if (ranks_.rank == 0)
            dev.download(snapshot_, model_.params.base, model_.params.bytes);
        gather_optimizer(model_, [&](const StatePiece& piece) {
            dev.download(snapshot_ + model_.params.bytes + piece.offset, piece.device, piece.bytes);
        });
        dev.sync();
        if (ranks_.rank > 0)
            return;

        identity_.recipe = o_.recipe();
        writing_step_ = step;
        const Counters counters = {.step = uint64_t(step), .data = batches_.position()};
        ranks_.set_timeout(0);  // if no thread can be started, the files are written right here
        writer_ = start_async([this, counters] { write(counters); });
        ranks_.set_timeout(o_.timeout);
    }

    // Runs in a thread. It reads nothing that changes before wait() or poll() has seen its end. The
    // state is written first, because a checkpoint counts as complete once its model file exists.
    void write(Counters counters) {
        const double start = now();
        const int step = static_cast<int>(counters.step);
        const std::string model_file = model_path(o_.output_dir, step);
        const std::string state_file = state_path(o_.output_dir, step);
        // save_at_the_end() may write a step twice. The second try may overwrite what the first
        // left.
        if (tried_step_ != step && access(model_file.c_str(), F_OK) == 0)
            throw Error(model_file +
                        ": exists already, but this run has not written it; move it elsewhere");
        tried_step_ = step;

        log_.sync();  // so that no checkpoint is ahead of its log, whatever happens
        log_.warn_if_replaced();
        output_->warn_if_replaced();

        counters.model_checksum = checksum64(snapshot_, model_.params.bytes);
        const Block optimizer = {snapshot_ + model_.params.bytes, optimizer_bytes()};
        write_state(state_file, identity_, counters, optimizer);
        try {
            write_model(model_file, my_header(), snapshot_);
        } catch (...) {
            // The next try may need the state's disk space.
            if (access(model_file.c_str(), F_OK))
                unlink(state_file.c_str());
            throw;
        }
        std::printf("checkpoint %s (and %s): %.2f GB in %.2f s\n", model_file.c_str(),
                    state_name(step).c_str(), snapshot_bytes(model_) / 1e9, now() - start);

        try {
            prune_checkpoints(o_.output_dir, o_.keep, o_.keep_every);
        } catch (const Error&) {
            prune_error_ = std::current_exception();
        }
    }

    // An error of the writer stops the run, which then tries again at its end. The checkpoint
    // counts once it is complete, even if older ones could not be removed.
    void finish_writing() {
        stop_.defer_error([&] {
            writer_.get();
            saved_step_ = writing_step_;
            if (prune_error_)
                std::rethrow_exception(std::exchange(prune_error_, nullptr));
        });
    }

    void restore(int step) {
        const std::string path = model_path(o_.output_dir, step);
        identity_.recipe = o_.recipe();
        std::unique_ptr<StateFile> state;  // null on ranks other than 0
        if (ranks_.rank == 0)
            state = open(step);
        const Counters counters = ranks_.broadcast(state ? state->counters : Counters{});

        if (state)
            read_parameters(path, counters.model_checksum);
        broadcast(model_, model_.params);

        scatter_optimizer(model_, [&](const StatePiece& to) {
            const auto upload_and_checksum = [&](const FilePiece& from) {
                model_.dev.upload(to.device + from.offset, from.data, from.bytes);
                state->add(from.data, from.bytes);
            };
            stream_in(model_.dev, state->file, state->begin + to.offset, to.bytes,
                      upload_and_checksum);
        });
        if (state)
            state->check();
        model_.dev.sync();

        check_parameters(model_, path, kRemove);
        batches_.restore(counters.data);
        saved_step_ = step;
    }

    // Opens the state of a checkpoint, and checks that it and the model file fit this run.
    std::unique_ptr<StateFile> open(int step) const {
        const std::string path = model_path(o_.output_dir, step);
        auto state = std::make_unique<StateFile>(state_path(o_.output_dir, step), identity_,
                                                 optimizer_bytes());
        if (!state->recipe_changes.empty())
            std::printf("changed since the checkpoint: %s\n", state->recipe_changes.c_str());
        if (state->counters.step != uint64_t(step))
            refuse(state->file.path, "the step in the file", step, state->counters.step,
                   "rename it and its model to that step");
        const ModelHeader header = read_model_header(path);
        const ModelHeader mine = my_header();
        if (std::memcmp(&header, &mine, sizeof header))
            refuse(path, "wrong model", description(mine), description(header), kRemove);
        return state;
    }

    // Reads the parameters of a model file with my_header() into the model.
    void read_parameters(const std::string& path, uint64_t expected) {
        const InputFile file(path);
        const size_t bytes = model_.params.bytes;
        Checksum64 checksum(bytes);
        stream_in(model_.dev, file, kHeaderBytes, bytes, [&](const FilePiece& piece) {
            model_.dev.upload(model_.params.base + piece.offset, piece.data, piece.bytes);
            checksum.add(piece.data, piece.bytes);
        });
        if (checksum.value() != expected)
            refuse(path, "damaged parameters", hex(expected), hex(checksum.value()), kRemove);
    }

    ModelHeader my_header() const { return {.dtype = dtype_of<X>(), .config = model_.config}; }
    size_t optimizer_bytes() const { return model_.adam.bytes * model_.shards(); }  // all ranks'

    const Options& o_;
    Model& model_;
    const Ranks<typename Model::Dev>& ranks_;
    Batches<Model>& batches_;
    Stop<Model>& stop_;
    Log& log_;
    OutputDir* output_ = nullptr;  // null on ranks that write no files
    Identity identity_;
    // The parameters, then the optimizer's state, in pinned memory. Null except on rank 0.
    char* snapshot_ = nullptr;
    std::future<void> writer_;        // runs write()
    int writing_step_ = -1;           // the step of the writer, or of the last one
    int tried_step_ = -1;             // the last step whose files write() has begun to write
    int saved_step_ = -1;             // the last step that has a complete checkpoint
    std::exception_ptr prune_error_;  // of the writer, whose checkpoint is complete all the same
};
