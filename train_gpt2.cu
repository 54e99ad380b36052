// GPT-2 training, top to bottom: tensors → forward → backward → update → training → main.
//
//   make train_gpt2cu && ./train_gpt2cu          trains a 124M model on the built-in corpus
//   ./train_gpt2cu --help                        every option
//
// The model is written once over two backends. `Dev` is Cuda (layers/, attention/) or Cpu
// (layers/cpu), and both have the same layer calls. `X` is the type in which weights and
// activations are stored. On CUDA it is bf16 or float. On the CPU it is float, and in tests also
// double. Sums, statistics, gradients of weights and optimizer state have the type A = Acc<X>. What
// surrounds the step (options, batches, checkpoints, validation, samples, the log) is in run/.
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdio>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"
#include "parallel/process_group.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/buffers.h"
#include "run/collectives.h"
#include "run/inference.h"
#include "run/statistics.h"
#include "run/training.h"
#include "run/weights.h"
// This comes last, because it is written over both backends' attention.
#include "attention/ring/ring.h"

// =================================================================================================
// Tensors, one line each (run/tensors.h). A per-layer tensor's pointer is to one layer's part.
// Config (run/checkpoint_files.h) has the sizes that a model file begins with: L layers, NH heads,
// C channels, V tokens, max_T positions.

// The sixteen parameter tensors in llm.c's file order. P is X for the parameters themselves and A
// for their gradients.
template <class P>
struct Parameters {
    P *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    P *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb, *lnfw, *lnfb;

    static TensorList list(const Config& c) {
        using S = Parameters;
        const size_t C = c.C;
        const size_t Vp = c.Vp;
        const size_t max_T = c.max_T;
        const int L = c.L;
        TensorList t;
        t.once("wte", &S::wte, {Vp, C}, kMatrix);
        t.once("wpe", &S::wpe, {max_T, C}, kTable);
        t.each("ln1w", &S::ln1w, C, L);
        t.each("ln1b", &S::ln1b, C, L);
        t.each("qkvw", &S::qkvw, {3 * C, C}, L, kMatrix);
        t.each("qkvb", &S::qkvb, 3 * C, L);
        t.each("attprojw", &S::attprojw, {C, C}, L, kMatrix);
        t.each("attprojb", &S::attprojb, C, L);
        t.each("ln2w", &S::ln2w, C, L);
        t.each("ln2b", &S::ln2b, C, L);
        t.each("fcw", &S::fcw, {4 * C, C}, L, kMatrix);
        t.each("fcb", &S::fcb, 4 * C, L);
        t.each("fcprojw", &S::fcprojw, {C, 4 * C}, L, kMatrix);
        t.each("fcprojb", &S::fcprojb, C, L);
        t.once("lnfw", &S::lnfw, C);
        t.once("lnfb", &S::lnfb, C);
        return t;
    }
};

// What forward keeps for backward. N = B·T rows. s.kept(n) is all layers while --recompute is below
// n and a backward follows. Otherwise all layers share one.
template <class X>
struct Activations {
    using A = Acc<X>;
    X *encoded, *ln1, *qkv, *atty, *att, *residual2, *ln2, *fch, *act, *residual3, *lnf;
    A *ln1_mean, *ln1_rstd, *lse, *ln2_mean, *ln2_rstd, *lnf_mean, *lnf_rstd;

    static TensorList list(const Sizes& s) {
        using S = Activations;
        const size_t N = s.N;
        const size_t NC = N * s.C;
        const int L = s.kept(INT_MAX);
        TensorList t;
        t.once("encoded", &S::encoded, NC);          // (N, C) wte + wpe
        t.each("ln1", &S::ln1, NC, s.kept(2));       // (N, C)
        t.each("ln1_mean", &S::ln1_mean, N, L);      // (N)
        t.each("ln1_rstd", &S::ln1_rstd, N, L);      // (N)
        t.each("qkv", &S::qkv, 3 * NC, s.cached());  // (N, 3, NH, HS), also the cache of samples
        t.each("atty", &S::atty, NC, L);             // (N, NH, HS)
        t.each("lse", &S::lse, s.lse, L);            // (B, NH, T), or what the ring keeps
        t.each("att", &S::att, s.att, L);            // (B, NH, T, T), naive attention only
        t.each("residual2", &S::residual2, NC, L);   // (N, C) after attention
        t.each("ln2", &S::ln2, NC, s.kept(2));       // (N, C)
        t.each("ln2_mean", &S::ln2_mean, N, L);      // (N)
        t.each("ln2_rstd", &S::ln2_rstd, N, L);      // (N)
        t.each("fch", &S::fch, 4 * NC, L);           // (N, 4C) before the activation function
        t.each("act", &S::act, 4 * NC, s.kept(1));   // (N, 4C) after it
        t.each("residual3", &S::residual3, NC, L);   // (N, C) after the MLP
        t.once("lnf", &S::lnf, NC);                  // (N, C)
        t.once("lnf_mean", &S::lnf_mean, N);         // (N)
        t.once("lnf_rstd", &S::lnf_rstd, N);         // (N)
        return t;
    }
};

// =================================================================================================
// The model

// How a model is used.
struct ModelSettings {
    Attention attention = Attention::flash;
    int B;
    int T;                  // this rank's tokens of a sequence
    int micro_steps = 1;    // this rank's, in a step
    bool training = false;  // adds gradients, optimizer state and what backward needs
    // 1: forward does not keep the activation's outputs; 2: nor the layer norms'
    int recompute = 0;
    // of keys and values: without training only a model with a cache can generate
    bool cache = false;
};

template <class Device, class Storage>
struct GPT2 {
    using Dev = Device;
    using X = Storage;
    using A = Acc<X>;
    static constexpr bool has_master = !std::is_same_v<X, A>;

    const Dev& dev;
    const Config config;
    const ModelSettings settings;
    const Attention attention = settings.attention;
    const int B = settings.B;
    const int T = settings.T;
    const int micro_steps = settings.micro_steps;
    const bool training = settings.training;
    const int recompute = settings.recompute;
    const Ranks<Dev> ranks;
    const size_t num_parameters = config.num_parameters();
    Sizes sizes;
    Arena params, grads, adam, acts, buffers, ring_memory;
    std::unique_ptr<Ring<Dev, X>> ring;  // if several ranks share a sequence
    typename Dev::Graph graph;           // of train_micro_batches

    Parameters<X> weights(int l = 0) const { return params.pointers<Parameters<X>>(l); }
    Parameters<A> gradients(int l = 0) const { return grads.pointers<Parameters<A>>(l); }
    Activations<X> activations(int l = 0) const { return acts.pointers<Activations<X>>(l); }
    Optimizer<X> optimizer() const { return adam.pointers<Optimizer<X>>(); }
    Buffers<X> workspace() const { return buffers.pointers<Buffers<X>>(); }

    // ---------------------------------------------------------------------------------------------
    // Forward: device tokens (b, t) → acts.lnf, the final layer norm's output. alone: no other rank
    // takes part, and the tokens are a whole sequence. Or they are the end of one, whose first
    // `past` tokens have left their rows in qkv, the cache of keys and values. Where a text grows
    // token by token, a call computes one row.

    void forward(const int* tokens, int b, int t, bool alone = false, int past = 0) {
        Range range("forward");
        const size_t N = size_t(b) * t;
        const int C = config.C;
        const Activations<X> whole = activations();
        const Parameters<X> table = weights();
        const X* wpe = table.wpe + size_t(past) * C;

        encoder_forward(dev, whole.encoded, tokens, table.wte, wpe, b, t, C,
                        alone ? Positions() : positions());
        const X* residual = whole.encoded;
        for (int l = 0; l < config.L; l++) {
            Range range("layer", l);
            const Activations<X> a = activations(l);
            const Parameters<X> w = weights(l);
            layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N, C);
            matmul_forward(dev, a.qkv + size_t(past) * 3 * C, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C);
            attend(a, b, t, past, alone);
            matmul_forward(dev, a.residual2, a.atty, w.attprojw, w.attprojb, N, C, C, residual);
            layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N,
                              C);
            matmul_activation_forward(dev, a.act, a.fch, a.ln2, w.fcw, w.fcb, N, C, 4 * C);
            matmul_forward(dev, a.residual3, a.act, w.fcprojw, w.fcprojb, N, 4 * C, C, a.residual2);
            residual = a.residual3;
            note_progress();
        }
        layernorm_forward(dev, whole.lnf, whole.lnf_mean, whole.lnf_rstd, residual, table.lnfw,
                          table.lnfb, N, C);
    }

    void attend(const Activations<X>& a, int b, int t, int past, bool alone) {
        if (ring && !alone)
            return ring->forward(a.atty, a.lse, a.qkv);
        attention_forward(dev, attention, a.atty, a.lse, a.att, a.qkv, b, t, past + t, config.NH,
                          config.HS());
    }

    // Cross-entropy over the rows of lnf, in chunks of rows. Writes the mean to mean_loss. With
    // gradient, it also does what needs a chunk's logits. It adds into dwte, or overwrites it if
    // not `accumulate`, and overwrites lnf with d(mean loss of the step)/d lnf.
    void loss(const int* targets, int b, int t, A* mean_loss, bool with_gradient,
              bool accumulate = true) {
        Range range("loss");
        const size_t N = size_t(b) * t;
        const int C = config.C;
        const int V = config.V;
        const int Vp = config.Vp;
        X* lnf = activations().lnf;
        const Buffers<X> buffers = workspace();
        const size_t chunk = sizes.chunk;
        const X* wte = weights().wte;
        const A dloss = with_gradient ? A(1) / (A(N) * num_losses()) : A(0);
        for (size_t row = 0; row < N; row += chunk) {
            const size_t n = std::min(chunk, N - row);
            X* rows = lnf + row * C;
            cross_entropy(dev, buffers.logits, buffers.losses + row, buffers.scratch, rows, wte,
                          targets + row, dloss, n, C, V, Vp);
            if (with_gradient)
                cross_entropy_backward(dev, rows, gradients().wte, buffers.scratch, buffers.logits,
                                       rows, wte, n, C, Vp, accumulate || row > 0);
        }
        reduce_sum(dev, mean_loss, buffers.scratch, buffers.losses, A(1) / A(N), N);
    }

    // ---------------------------------------------------------------------------------------------
    // Backward: adds into the gradients of all parameters, or overwrites the matmul weights' if not
    // `accumulate`. It starts from lnf, where loss() left its gradient, and reuses that memory for
    // the gradient of each layer norm's output.

    void backward(const int* plan, bool accumulate, bool sum) {
        Range range("backward");
        const size_t N = sizes.N;
        const int C = config.C;
        const Buffers<X> buffers = workspace();
        X* dresidual = buffers.dresidual;
        void* scratch = buffers.scratch;
        const Activations<X> top = activations(config.L - 1);
        X* dln = top.lnf;

        // A layer norm's backward also sums the rows of the residual stream's gradient. That is the
        // bias gradient of the projection that was added there last.
        dev.zero(dresidual, N * C * sizeof(X));
        const Parameters<A> gf = gradients(config.L - 1);
        layernorm_backward(dev, dresidual, gf.lnfw, gf.lnfb, gf.fcprojb, scratch, dln,
                           top.residual3, weights().lnfw, top.lnf_mean, top.lnf_rstd, N, C);
        for (int l = config.L - 1; l >= 0; l--) {
            Range range("layer", l);
            const Activations<X> a = activations(l);
            const Parameters<X> w = weights(l);
            const Parameters<A> g = gradients(l);
            const X* residual = l ? activations(l - 1).residual3 : a.encoded;
            A* bias_below = l ? gradients(l - 1).fcprojb : nullptr;
            // (N, 4C): fch's gradient, then qkv's. From -r 1 on it is in the logits' memory, which
            // is free by now.
            X* wide = recompute >= 1 ? buffers.logits : a.act;
            auto fcproj_weight_gradient = [&] {
                matmul_backward<X>(dev, nullptr, g.fcprojw, dresidual, a.act, nullptr, N, 4 * C, C,
                                   accumulate);
            };
            if (recompute == 0)
                fcproj_weight_gradient();  // before fch's gradient takes the place of act
            matmul_activation_backward(dev, wide, g.fcb, recompute >= 1 ? a.act : nullptr, scratch,
                                       dresidual, w.fcprojw, a.fch, N, 4 * C, C);
            // needs the output that the pass over fch recomputed
            if (recompute >= 1)
                fcproj_weight_gradient();
            if (recompute >= 2)
                layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b,
                                  N, C);
            matmul_backward(dev, dln, g.fcw, wide, a.ln2, w.fcw, N, C, 4 * C, accumulate);
            layernorm_backward(dev, dresidual, g.ln2w, g.ln2b, g.attprojb, scratch, dln,
                               a.residual2, w.ln2w, a.ln2_mean, a.ln2_rstd, N, C);
            X* datty = dln;
            X* dqkv = wide;  // their old contents have been used
            matmul_backward(dev, datty, g.attprojw, dresidual, a.atty, w.attprojw, N, C, C,
                            accumulate);
            attend_backward(dqkv, datty, a, scratch);
            if (recompute >= 2)
                layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N,
                                  C);
            // v's bias gradient follows from the projection's, see layers.h.
            qkv_bias_backward(dev, g.qkvb, scratch, dqkv, g.attprojb, w.attprojw, N, C);
            matmul_backward(dev, dln, g.qkvw, dqkv, a.ln1, w.qkvw, N, C, 3 * C, accumulate);
            layernorm_backward(dev, dresidual, g.ln1w, g.ln1b, bias_below, scratch, dln, residual,
                               w.ln1w, a.ln1_mean, a.ln1_rstd, N, C);
            if (sum)
                sum_gradients(*this, l);
            note_progress();
        }
        encoder_backward(dev, gf.wte, gf.wpe, scratch, dresidual, plan, B, T, C, positions());
        if (sum)
            sum_gradients(*this);
    }

    void attend_backward(X* dqkv, const X* datty, const Activations<X>& a, void* scratch) {
        if (ring)
            return ring->backward(dqkv, datty, a.atty, a.lse, a.qkv);
        attention_backward(dev, attention, dqkv, scratch, datty, a.atty, a.lse, a.att, a.qkv, B, T,
                           config.NH, config.HS());
    }

    // ---------------------------------------------------------------------------------------------
    // A step uploads all its micro-batches. Then it calls forward, loss (which starts backward) and
    // backward for each, and updates the parameters.

    // of one micro-batch
    size_t batch_ints() const { return 2 * sizes.N + encoder_plan_ints(dev, sizes.N); }
    const int* tokens(int i) const { return workspace().batch + i * batch_ints(); }
    const int* targets(int i) const { return tokens(i) + sizes.N; }
    const int* plan(int i) const { return tokens(i) + 2 * sizes.N; }

    // tokens, targets and plan of one micro-batch
    void fill_batch(int* host, Loader& loader) const {
        next_tokens(*this, host, loader);
        if (training)
            encoder_plan(dev, host + 2 * sizes.N, host, sizes.N);
    }
    void upload(const int* host, int micro_batches) {
        dev.upload(workspace().batch, host, size_t(micro_batches) * batch_ints() * sizeof(int));
    }

    // The matmul weights need no zeros, because the first micro-batch overwrites their gradients.
    void clear_gradients() {
        size_t begin = 0;  // of the stretch of tensors to clear, in bytes
        const auto clear_until = [&](size_t end) {
            if (end > begin)
                dev.zero(grads.base + begin, end - begin);
        };
        for (size_t i = 0; i < grads.tensors.size(); i++) {
            if (!grads.tensors[i].is_matrix())
                continue;
            clear_until(grads.offsets[i]);
            begin = grads.offsets[i] + grads.tensors[i].elements() * sizeof(A);
        }
        clear_until(grads.bytes);
    }

    void train_micro_batch(int i, bool sum = false) {  // over all ranks
        const bool accumulate = i > 0;
        if (!accumulate)
            clear_gradients();
        forward(tokens(i), B, T);
        loss(targets(i), B, T, statistics().losses_of(ranks.rank) + i, true, accumulate);
        backward(plan(i), accumulate, sum);
    }

    void train_micro_batches() {
        Range range("forward and backward");
        const bool several = ranks.size > 1;
        graph.run(dev, [&] {
            for (int i = 0; i < micro_steps; i++)
                train_micro_batch(i, several && i + 1 == micro_steps);
            if (several)
                gather_losses(*this);
        });
    }

    void evaluate_micro_batch(int i) {
        forward(tokens(i), B, T);
        loss(targets(i), B, T, statistics().losses_of(ranks.rank) + i, false);
    }

    // Updates nothing if a loss or the gradient's norm is not finite. The caller sees that in the
    // norm.
    void update(const AdamW& hyper) {
        Range range("update");
        const Buffers<X> buffers = workspace();
        const Optimizer<X> state = optimizer();
        A* g = gradients_to_update(*this);
        A* gate = g + sizes.parameters;
        // 0·losses: NaN if one of them is not finite. Then the norm is, and nothing is updated.
        reduce_sum(dev, gate, buffers.scratch, statistics().losses(), A(0), num_losses());
        const A* norm = norm_of_gradients(*this, g, sizes.parameters + kGate);
        dev.mark();  // the host reads losses and norm while the rest goes on
        const std::vector<ParamRange> own = share(ranks.rank);
        adamw_update(dev, weights().wte, state.master, state.m, state.v, g, norm, own.data(),
                     static_cast<int>(own.size()), hyper);
        if (ranks.sharded)
            gather_parameters(*this);
    }

    DeviceStatistics<A> statistics() const {
        return {.base = workspace().stats,
                .ranks = size_t(ranks.size),
                .micro_steps = size_t(micro_steps)};
    }
    size_t num_losses() const { return statistics().num_losses(); }  // of a step
    // (N) of the last micro-batch
    A* losses() const { return workspace().losses; }

    // ---------------------------------------------------------------------------------------------
    // Making a model. The constructor makes only the tables, and allocate() makes them memory.

    GPT2(const Dev& dev, const Config& config, const ModelSettings& settings,
         const Ranks<Dev>& ranks = {})
        : dev(dev), config(config), settings(settings), ranks(ranks) {
        if (sequence() > config.max_T)
            throw Error(format("T = %d is beyond the model's %d positions: use -t %d or less",
                               sequence(), config.max_T, config.max_T));
        check_attention<X>(dev, attention, config.HS(),
                           {.training = training, .context_parallel = ranks.context > 1});
        const size_t N = size_t(B) * T;
        const size_t C = config.C;
        const AttentionShape shape{.B = B, .Tq = T, .Tk = T, .NH = config.NH, .HS = config.HS()};
        if (ranks.context > 1)
            ring = std::make_unique<Ring<Dev, X>>(
                dev, RingRank{.rank = ranks.context_rank(), .ranks = ranks.context}, shape,
                attention);

        sizes.L = config.L;
        sizes.N = N;
        sizes.C = C;
        sizes.Vp = config.Vp;
        sizes.training = training;
        sizes.cache = settings.cache;
        sizes.recompute = recompute;
        sizes.lse = ring ? ring->lse_elements() : N * shape.NH;
        sizes.att = attention_saved_bytes<X>(dev, attention, shape) / sizeof(X);
        sizes.chunk = classifier_chunk(N);
        sizes.stats = statistics().elements();
        sizes.ranks = ranks.size;
        sizes.parameters = num_parameters / shards();
        sizes.share = training && ranks.sharded ? sizes.parameters + kGate : 0;
        sizes.batch = micro_steps * batch_ints();
        sizes.scratch =
            std::max({ring ? 0 : attention_scratch_bytes<X>(dev, attention, shape),
                      encoder_scratch_bytes(dev, B, T, C), layernorm_scratch_bytes(dev, C),
                      qkv_bias_scratch_bytes(dev, C),
                      matmul_activation_scratch_bytes(dev, N, 4 * C, C), reduce_scratch_bytes(dev),
                      size_t(256), cross_entropy_scratch_bytes<X>(dev, sizes.chunk, C, config.Vp)});

        params = Arena("parameters", Parameters<X>::list(config), 1);
        if (training) {
            TensorList list = Parameters<A>::list(config);
            list.push_back({.name = "loss", .dtype = dtype_of<A>(), .rows = 1, .cols = kGate});
            grads = Arena("gradients", list, 1);
            adam = Arena("optimizer", Optimizer<X>::list(sizes), 16);
        }
        acts = Arena("activations", Activations<X>::list(sizes));
        buffers = Arena("buffers", Buffers<X>::list(sizes));
        if (ring)
            ring_memory = Arena(
                "ring",
                {{.name = "ring", .dtype = DType::i32, .rows = 1, .cols = ring->bytes() / 4}});
    }
    ~GPT2() {
        for (Arena* a : arenas())
            dev.free(a->base);
    }
    GPT2(const GPT2&) = delete;
    GPT2& operator=(const GPT2&) = delete;

    void allocate() {
        for (Arena* a : arenas())
            if (a->bytes)
                a->base = static_cast<char*>(dev.alloc(a->bytes));
        if (ring)
            ring->start(ring_memory.base, ranks.context_comm.get());
        if (adam.base)
            dev.zero(adam.base, adam.bytes);
    }
    std::array<Arena*, 6> arenas() {
        return {&params, &grads, &adam, &acts, &buffers, &ring_memory};
    }
    size_t total_bytes() {
        size_t bytes = 0;
        for (Arena* a : arenas())
            bytes += a->bytes;
        return bytes;
    }

    // Rows of logits that exist at once, at most 2 GiB of them. Every chunk adds to the head's
    // whole gradient, so there should be few.
    size_t classifier_chunk(size_t rows) const {
        size_t chunk = 512;
        while (chunk < rows && 2 * chunk * config.Vp * sizeof(X) <= (size_t(2) << 30))
            chunk *= 2;
        return std::min(chunk, rows);
    }

    Positions positions() const {  // of this rank's tokens
        if (!ring)
            return {};
        const Zigzag zigzag{ranks.context};
        const int chunk = T / 2;
        const int rank = ranks.context_rank();
        return {chunk, zigzag.chunk(rank, 0) * chunk, zigzag.chunk(rank, 1) * chunk};
    }
    bool tf32() const { return dev.tf32 && std::is_same_v<X, float>; }  // matmuls in TF32
    int sequence() const { return T * ranks.context; }                  // tokens of a whole one
    int shards() const { return ranks.sharded ? ranks.size : 1; }       // of the optimizer
    std::vector<ParamRange> share(int rank) const {
        return share_of(params.tensors, rank, shards(), ranks.overlap);
    }
};

// =================================================================================================
// The training loop. Run (run/training.h) has the data, the log and the checkpoints.

constexpr int kProfileWarmUp = 5;  // steps before --profile's

template <class Model>
void train_step(Run<Model>& run) {
    Range range("step", run.step);
    Model& model = run.model;
    run.begin_step();  // the clock starts
    model.upload(run.batches.current(), model.micro_steps);
    model.train_micro_batches();
    run.prepare_next_batches();  // while the GPU works
    model.update(run.o.adamw(run.step));
    run.end_step();  // reads the loss, prints and logs it
}

template <class Model>
void train(Run<Model>& run) {
    const Options& o = run.o;
    if (run.step == 0)
        run.evaluation.run_if_due(run.step);
    while (run.goes_on()) {
        if (o.profile && run.step == kProfileWarmUp)
            run.dev.profile(true);
        train_step(run);
        run.evaluation.run_if_due(run.step);
        run.checkpoints.save_if_due(run.step);
    }
    if (o.profile)
        run.dev.profile(false);
    if (run.stop.signal())
        std::printf("interrupted at step %d\n", run.step);
    run.checkpoints.save_at_the_end(run.step);
    run.stop.defer_error([&] { run.log.retry(); });
    run.stop.rethrow();
    run.conclude();
}

template <class Dev, class X>
int run_train(const Dev& dev, Options& o, const Config& config, bool from_file, Ranks<Dev> ranks) {
    const bool on_cpu = std::string(Dev::kind) == "cpu";
    resolve_sizes(o, config.max_T, config.C, on_cpu, ranks.size);
    if (o.overlap < 0)
        o.overlap = ranks.local_size < ranks.size;
    ranks.sharded = o.zero > 0 && ranks.size > 1;
    ranks.overlap = o.overlap > 0;
    // The model's tables come first, so that an impossible request is refused before data is
    // touched.
    const int micro_steps = o.tokens_per_step / (o.B * o.T * ranks.groups());
    GPT2<Dev, X> model(dev, config,
                       {.attention = o.kernel(),
                        .B = o.B,
                        .T = o.T / ranks.context,
                        .micro_steps = micro_steps,
                        .training = true,
                        .recompute = o.recompute},
                       ranks);
    if (o.memory)
        return print_memory_table(model), 0;
    std::unique_ptr<OutputDir> output;
    if (!o.output_dir.empty() && ranks.rank == 0)
        output = prepare_output_dir(o);
    const Data data = find_data(o);
    if (!can_generate(config.V))
        o.sample_every = 0;
    Run<GPT2<Dev, X>> run(o, model, data);
    if (o.profile)
        o.max_steps = kProfileWarmUp + o.profile;
    resolve_steps(o, on_cpu, run.batches.loader().windows());
    run.describe();
    return run_rank(ranks, [&] {
        allocate_or_explain(model);
        const bool found = o.resume && run.restore();
        if (!found)
            from_file ? load(model, o.init) : init_random(model, o.seed);
        if (o.resume) {
            std::printf(found ? "resumed at step %d\n" : "nothing to resume: starting at step %d\n",
                        run.step);
            if (run.step >= o.max_steps)
                std::printf("nothing left to do: raise -x (now %d)\n", o.max_steps);
        }
        run.check_ranks_agree();
        run.open_log(output.get());
        catch_signals();
        train(run);
        return run.stop.signal() ? 128 + run.stop.signal() : 0;
    });
}

// The vocabulary of `tiny` is only a default: run_with() makes it that of the training data.
std::optional<Config> preset_config(const std::string& name) {
    static const std::map<std::string, Config> presets = {
        {"tiny", {.max_T = 256, .V = kByteVocab, .Vp = 384, .L = 4, .NH = 2, .C = 128}},
        {"d12", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 12, .NH = 12, .C = 768}},
        {"d24", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 24, .NH = 16, .C = 1024}},
        {"d36", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 36, .NH = 20, .C = 1280}},
        {"d48", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 48, .NH = 25, .C = 1600}},
    };
    const auto preset = presets.find(name.starts_with("gpt2:") ? name.substr(5) : name);
    if (preset == presets.end())
        return std::nullopt;
    return preset->second;
}

template <class Dev, class X>
int run_with(const Dev& dev, Options& o, const ProcessGroup& group) {
    const std::optional<Config> preset = preset_config(o.init);
    Config config;
    if (preset) {
        config = *preset;
    } else {
        struct stat file;
        if (stat(o.init.c_str(), &file))
            throw UsageError(
                format("--init %s: neither d12, d24, d36, d48, tiny nor a file", o.init.c_str()));
        if (S_ISDIR(file.st_mode)) {
            const int newest = newest_model(o.init);
            if (newest < 0)
                throw UsageError(
                    format("--init %s: holds no run of ours; give a model file", o.init.c_str()));
            o.init = model_path(o.init, newest);
        }
        config = read_model_header(o.init).config;
        if (config.V > kEndOfText && o.tokenizer.empty() && group.prints())
            std::fprintf(stderr, "%s: without --tokenizer it reads and writes text byte by byte\n",
                         o.init.c_str());
    }
    // a new model has at least -t positions
    if (preset)
        config.max_T = std::max(config.max_T, o.T);
    if (preset && config.V == kByteVocab) {
        for (const std::string& data : {o.train_data, o.val_data})
            if (!data.empty())
                config.V = std::max(config.V, vocabulary_of(data, !o.tokenizer.empty()));
        config.Vp = (config.V + 127) / 128 * 128;
    }
    if (o.generate > 0) {
        if (preset)
            throw UsageError("--generate needs a trained model: give its checkpoint with -e");
        return run_generate<GPT2<Dev, X>>(dev, o, config);
    }
    Ranks<Dev> ranks = connect(dev, group, o.context_parallel);
    if (o.eval_only)
        return run_evaluate<GPT2<Dev, X>>(dev, o, config, !preset.has_value(), ranks);
    return run_train<Dev, X>(dev, o, config, !preset.has_value(), ranks);
}

#ifndef TRAIN_GPT2_NO_MAIN
// "COMMIT clean", "COMMIT dirty" or "unknown dirty", by the Makefile
extern const char built_from[];

// The run, on this rank's device. gpus is the number on this machine.
static int run_on_device(Options& o, const ProcessGroup& group, int gpus) {
    if (gpus == 0) {
        if (o.precision == "bf16")
            throw UsageError("--precision bf16 needs a GPU; the CPU runs fp32");
        if (o.init.empty())
            o.init = "tiny";
        return run_with<Cpu, float>(Cpu(), o, group);
    }
    Cuda dev(group.device(gpus));
    if (group.prints())
        std::fputs(missing_kernels(dev.sm, dev.sm90a), stderr);
    dev.tf32 = !o.no_tf32 && dev.sm >= 80;
    dev.graphs = !o.profile;
    if (o.init.empty())
        o.init = "d12";
    if (o.precision == "bf16" && dev.sm < 80)
        throw Error(
            format("--precision bf16 needs compute capability 8.0 or later, %s has %d.%d: use "
                   "--precision fp32",
                   dev.name.c_str(), dev.sm / 10, dev.sm % 10));
    if (o.precision == "auto")
        o.precision = dev.sm >= 80 ? "bf16" : "fp32";
    return o.precision == "bf16" ? run_with<Cuda, bf16>(dev, o, group)
                                 : run_with<Cuda, float>(dev, o, group);
}

int main(int argc, char** argv) {
    prepare_process();
    return check_stdout(run_program("train_gpt2cu", [&] {
        if (std::find(argv, argv + argc, std::string("--version")) != argv + argc) {
            const bool known = std::string(built_from, 7) != "unknown";
            std::printf("train_gpt2cu 1.0%s%s\n", known ? ", commit " : "",
                        known ? built_from : "");
            return 0;
        }
        Options o;
        o.program = argv[0];
        std::vector<Option> table = o.table();
        if (parse_options(argc, argv, table) == Parsed::help) {
            const char* const about =
                "Trains GPT-2. Without options: 124M parameters on the built-in corpus. README.md "
                "has examples.\n"
                "--version prints the version.";
            std::printf("%s", options_help("train_gpt2cu", about, Options().table()).c_str());
            return 0;
        }
        check_all_are_used(o, table);
        if (o.output_dir.empty() && (o.resume || o.checkpoint_every || o.keep || o.keep_every))
            throw UsageError("-y, -n, -nk and -nm need a directory: give it with -o");
        if (o.eval_only && o.init.empty())
            throw UsageError("--eval-only needs a model: give its checkpoint with -e");
        std::string why;
        const int gpus = o.device == "cpu" ? 0 : Cuda::count(&why);
        if (o.device == "cuda" && gpus == 0)
            throw Error("--device cuda: " + why + "; use --device cpu");
        const RankInfo self = rank_from_environment();
        check_ranks(o, self, gpus, why);
        if (o.gpus > 1 && self.size == 1 && !o.memory)
            return launch_ranks(o.gpus, argv);
        // Is made while the device starts.
        [[maybe_unused]] const std::future<void> corpus = begin_corpus(o);
        if (gpus == 0 && o.device == "auto" && self.rank == 0)
            std::fprintf(stderr, "no usable GPU (%s): using the CPU\n", why.c_str());
        try {
            ProcessGroup group(self, std::max(o.gpus, self.size));
            if (group.size > 1 && !o.memory)
                group.rendezvous(self, options_settings(o.table()), o.first_timeout());
            return run_on_device(o, group, gpus);
        } catch (const UsageError&) {  // which all ranks have, so one says it
            if (self.rank == 0)
                throw;
            return 2;
        }
    }));
}
#endif
