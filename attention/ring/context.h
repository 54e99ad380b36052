// Attention over a sequence that N ranks share, each with T/N of its tokens. There are two forms. An exchange of heads
// (heads.h) is for an N that divides the number of heads, and a ring (ring.h) is for any N.
//
// A rank's tensors hold its 2·Tc tokens in the order (early chunk, late chunk), see Zigzag. They are qkv
// (B, 2Tc, 3, NH, HS), out and dout (B, 2Tc, NH, HS), lse (B·NH·2Tc elements), and dqkv as qkv.
#pragma once
#include <algorithm>

#include "layers/gpu/types.h"

// Which rank has what of the sequence.
struct Zigzag {
    int ranks;
    int chunk(int rank, int half) const { return half == 0 ? rank : 2 * ranks - 1 - rank; }
    int owner(int chunk) const { return std::min(chunk, 2 * ranks - 1 - chunk); }
    int source(int rank, int step) const { return (rank - step + ranks) % ranks; }  // of the keys at a step
    // True if any query of one chunk sees any key of the other. The mask cuts a pair only if both are the same chunk.
    static bool sees(int query_chunk, int key_chunk) { return key_chunk <= query_chunk; }
    // How many chunks of another rank's keys the queries of `rank` see at a step, which is both or only the early one.
    // The gradients of those keys reach the ranks that see both last. So until then nobody has added to the late
    // chunk's, and from then on every rank adds.
    int seen(int rank, int step) const { return sees(chunk(rank, 1), chunk(source(rank, step), 1)) ? 2 : 1; }
};

// One rank's part. Comm connects the ranks of one sequence, as in layers/comm/comm.h.
template <class Dev, class X, class Comm = typename Dev::Comm>
class ContextParallel {
  public:
    using A = Acc<X>;
    virtual ~ContextParallel() = default;
    virtual const char* name() const = 0;
    // start() gives it memory of bytes(), which must be one whole allocation, and the communicator. Other ranks map
    // that memory, so nobody may free it before stop(), which all ranks call together.
    size_t bytes() const { return bytes_; }
    void start(void* memory, Comm* comm) {
        place(memory);
        comm_ = comm;
        if (zigzag_.ranks > 1) comm_->share(memory, bytes_);
    }
    void stop() {
        if (comm_ && zigzag_.ranks > 1) comm_->share(nullptr, 0);
        comm_ = nullptr;
    }
    // Forward writes out and lse, backward every element of dqkv. How lse lies is the form's own business.
    virtual void forward(X* out, A* lse, const X* qkv) = 0;
    virtual void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) = 0;

  protected:
    const Dev& dev_;
    const Zigzag zigzag_;
    const int rank_, B_, Tc_, NH_, HS_;
    const Attention attention_;
    size_t bytes_ = 0;
    Comm* comm_ = nullptr;

    ContextParallel(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS, Attention attention)
        : dev_(dev), zigzag_{ranks}, rank_(rank), B_(B), Tc_(Tc), NH_(NH), HS_(HS), attention_(attention) {}
    struct Taker {  // takes one piece of memory after the other
        void* memory;
        size_t used = 0;
        template <class P>
        void operator()(P*& p, size_t n) {
            p = reinterpret_cast<P*>(reinterpret_cast<uintptr_t>(memory) + used);
            used += (n * sizeof(P) + 255) / 256 * 256;
        }
    };
    virtual size_t place(void* memory) = 0;  // returns the bytes
    size_t C() const { return size_t(NH_) * HS_; }
    size_t tokens() const { return size_t(B_) * 2 * Tc_; }
    size_t elements() const { return tokens() * C(); }
};
