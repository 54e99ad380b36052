// A run's checkpoints. They are written by a thread, while training goes on from step to step, from
// a snapshot in rank 0's host memory. run/checkpoint_files.h has the files.
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
        if (bytes)
            snapshot_ = static_cast<char*>(model.dev.alloc_host(bytes));
        const Config& c = model.config;
        const char* const order = o.overfit ? "one batch" : o.no_shuffle ? "as it is" : "shuffled";
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
        if (written_.valid())
            written_.wait();  // when an Error unwinds
        model_.dev.free_host(snapshot_);
    }
    Checkpoints(const Checkpoints&) = delete;
    Checkpoints& operator=(const Checkpoints&) = delete;

    // Removes what a killed run left in the output directory, and checkpoints that are not to be
    // kept.
    void clean_up(OutputDir& output) {
        output_ = &output;
        remove_leftovers(o_.output_dir);
        prune_checkpoints(o_.output_dir, o_.keep, o_.keep_every);
    }

    // Notices that a checkpoint has been written, or failed, without waiting for it.
    void poll() {
        if (written_.valid() &&
            written_.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
            end_of_writing();
    }

    // Waits for the checkpoint that is being written. All ranks call this together.
    void await() {
        ranks_.set_timeout(0);  // a disk may take its time
        if (written_.valid())
            end_of_writing();
        if (ranks_.rank == 0)
            ranks_.set_timeout(o_.timeout);  // the others may still wait for its disk
        last_ = ranks_.broadcast(last_);
        ranks_.set_timeout(o_.timeout);
    }

    void save_if_due(int step) {
        if (o_.checkpoint_every && step % o_.checkpoint_every == 0 && !stop_.failed())
            save(step);
    }

    // A checkpoint of what is good, also after an error. If it cannot be written, it is tried once
    // more.
    void save_at_the_end(int step) {
        if (o_.output_dir.empty() || step == 0)
            return;
        await();
        for (int tries = 0; tries < 2 && last_ != step; tries++) {
            save(step);
            await();
        }
    }

    // Makes the newest checkpoint the model's parameters and optimizer's state, and returns its
    // step, or -1 if there is none. Rank 0 reads and sends, because the directory need not exist on
    // other machines.
    int restore() {
        ranks_.set_timeout(0);  // a disk may take its time
        const int newest =
            ranks_.broadcast(ranks_.rank > 0 ? -1 : checkpoint_to_resume(o_.output_dir));
        if (newest >= 0)
            restore(newest);
        ranks_.set_timeout(o_.first_timeout());
        return newest;
    }

    // What to say when training cannot go on.
    std::string last_good() const {
        const std::string path = last_ < 0 ? "none" : model_path(o_.output_dir, last_);
        return "last good checkpoint: " + path + "; a lower -l or a longer -u may help";
    }

  private:
    static constexpr char kRemove[] =
        "remove it and its state to resume from the checkpoint before";

    const Options& o_;
    Model& model_;
    const Ranks<typename Model::Dev>& ranks_;
    Batches<Model>& batches_;
    Stop<Model>& stop_;
    Log& log_;
    OutputDir* output_ = nullptr;  // null: this rank writes no files
    Identity identity_;
    // the parameters and the optimizer's state, pinned, on rank 0 alone
    char* snapshot_ = nullptr;
    std::future<void> written_;  // the last checkpoint, by write()
    int writing_ = -1;           // its step
    int tried_ = -1;             // the last step of which this process began to write a checkpoint
    int last_ = -1;              // the last step of which there is a checkpoint
    std::exception_ptr prune_error_;

    // Training waits only for the snapshot, and for the checkpoint before if it is still being
    // written.
    void save(int step) {
        Range range("checkpoint");
        await();
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
        writing_ = step;
        const Counters counters{uint64_t(step), 0, batches_.position()};
        ranks_.set_timeout(0);  // without a thread to spare it is written here
        written_ = start_async([this, counters] { write(counters); });
        ranks_.set_timeout(o_.timeout);
    }

    // Runs while training goes on, and reads nothing that changes until await() returns. The model
    // is written last, because a checkpoint is there when its model is.
    void write(Counters counters) {
        const double start = now();
        const int step = static_cast<int>(counters.step);
        const std::string state = state_path(o_.output_dir, step);
        const std::string path = model_path(o_.output_dir, step);
        if (tried_ != step && access(path.c_str(), F_OK) == 0)
            throw Error(path + ": is not this run's, and is not overwritten; move it away");
        tried_ = step;
        counters.model_checksum = checksum64(snapshot_, model_.params.bytes);
        log_.sync();  // no checkpoint is ahead of its log, whatever happens
        log_.warn_if_replaced();
        output_->warn_if_replaced();
        write_state(state, identity_, counters,
                    {snapshot_ + model_.params.bytes, model_.adam.bytes * model_.shards()});
        try {
            write_model(path, {dtype_of<X>(), model_.config}, snapshot_);
        } catch (...) {
            if (access(path.c_str(), F_OK))
                unlink(state.c_str());  // what is tried next may need its space
            throw;
        }
        std::printf("checkpoint %s (and state_%08d.bin): %.2f GB in %.2f s\n", path.c_str(), step,
                    snapshot_bytes(model_) / 1e9, now() - start);
        try {
            prune_checkpoints(o_.output_dir, o_.keep, o_.keep_every);
        } catch (const Error&) {
            prune_error_ = std::current_exception();
        }
    }

    // An error of writing ends the run, which then tries again. A checkpoint counts when it is
    // whole, even if older ones could not be removed.
    void end_of_writing() {
        stop_.defer_error([&] {
            written_.get();
            last_ = writing_;
            if (prune_error_)
                std::rethrow_exception(std::exchange(prune_error_, nullptr));
        });
    }

    void restore(int step) {
        const std::string path = model_path(o_.output_dir, step);
        identity_.recipe = o_.recipe();
        std::unique_ptr<StateFile> state;  // of rank 0
        if (ranks_.rank == 0)
            state = open(step);
        const Counters counters = ranks_.broadcast(state ? state->counters : Counters{});
        if (state)
            read_parameters(path, counters.model_checksum);
        broadcast(model_, model_.params);
        scatter_optimizer(model_, [&](const StatePiece& piece) {
            const auto upload = [&](const FilePiece& read) {
                model_.dev.upload(piece.device + read.offset, read.data, read.bytes);
                state->add(read.data, read.bytes);
            };
            stream_in(model_.dev, state->file, state->begin + piece.offset, piece.bytes,
                      piece.bytes, upload);
        });
        if (state)
            state->check();
        model_.dev.sync();
        check_parameters(model_, path, kRemove);
        batches_.restore(counters.data);
        last_ = step;
    }

    std::unique_ptr<StateFile> open(int step) const {
        const std::string path = model_path(o_.output_dir, step);
        auto state = std::make_unique<StateFile>(state_path(o_.output_dir, step), identity_,
                                                 model_.adam.bytes * model_.shards());
        if (!state->recipe_changes.empty())
            std::printf("changed since the checkpoint: %s\n", state->recipe_changes.c_str());
        if (state->counters.step != uint64_t(step))
            refuse(state->file.path, "the step in it", step, state->counters.step,
                   "give it and its model their names back");
        const ModelHeader header = read_model_header(path);
        const ModelHeader mine = {dtype_of<X>(), model_.config};
        if (std::memcmp(&header, &mine, sizeof header))
            refuse(path, "a model", words(mine), words(header), kRemove);
        return state;
    }

    // As they are in the file of a model like this one.
    void read_parameters(const std::string& path, uint64_t expected) {
        const InputFile file(path);
        const size_t bytes = model_.params.bytes;
        Checksum64 checksum(bytes);
        stream_in(model_.dev, file, kHeaderBytes, bytes, bytes, [&](const FilePiece& piece) {
            model_.dev.upload(model_.params.base + piece.offset, piece.data, piece.bytes);
            checksum.add(piece.data, piece.bytes);
        });
        if (checksum.value() != expected)
            refuse(path, "damaged parameters", hex(expected), hex(checksum.value()), kRemove);
    }
};
