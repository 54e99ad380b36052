// Writes loss, logits and every gradient of one batch in strict fp32 as raw numbers. The test dev/test_hf.py compares
// them with Hugging Face's GPT-2. This file includes the program itself.
//
//   ./dev/dump_gradients --model model.bin --batch batch.bin -b 3 -t 37 --out numbers.bin --device cpu
//
//   batch   int32: tokens (B, T), then targets (B, T)
//   out     fp32: mean loss (1), logits (B·T, Vp), gradients in the order and shapes of the checkpoint
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include "../train_gpt2.cu"
#include "data/file.h"

namespace {

struct Dump {
    std::string model, batch, out, device = "cpu", attention = "flash";
    int B = 1, T = 1;
};

template <class Dev>
void dump(const Dev& dev, const Dump& o) {
    const Config config = read_model_header(o.model).config;
    const Attention attention{o.attention};
    GPT2<Dev, float> model(dev, config, attention, o.B, o.T, 1, true);
    allocate_or_explain(model);
    load(model, o.model);

    const size_t N = size_t(o.B) * o.T;
    const InputFile file(o.batch);
    std::vector<int> batch(model.batch_ints());
    file.read(0, batch.data(), 2 * N * sizeof(int));
    for (size_t i = 0; i < 2 * N; i++)
        if (batch[i] < 0 || batch[i] >= config.V)
            throw Error(format("%s: expected ids below %d, found %d", o.batch.c_str(), config.V, batch[i]));
    encoder_plan(dev, batch.data() + 2 * N, batch.data(), N);
    model.upload(batch.data(), 1);
    model.train_micro_batch(0);

    const size_t num_logits = N * config.Vp;
    // Forward runs again, because backward wrote its gradient over lnf. The logits are computed here, because the model
    // only keeps a chunk of them.
    model.forward(model.tokens(0), o.B, o.T);
    float* logits = static_cast<float*>(dev.alloc(num_logits * sizeof(float)));
    matmul_forward<float>(dev, logits, model.activations().lnf, model.weights().wte, nullptr, N, config.C, config.Vp);

    std::vector<float> out(1 + num_logits + model.num_parameters);
    dev.download(&out[0], model.stats(), sizeof(float));
    dev.download(&out[1], logits, num_logits * sizeof(float));
    dev.download(&out[1 + num_logits], model.grads.base, model.num_parameters * sizeof(float));
    write_whole_file(o.out, {{out.data(), out.size() * sizeof(float)}});
    dev.free(logits);
}

}  // namespace

int main(int argc, char** argv) {
    return run_program("dump_gradients", [&] {
        Dump o;
        std::vector<Option> table = {
            {"--model", "", Option::String, &o.model, "checkpoint, fp32 or bf16", ""},
            {"--batch", "", Option::String, &o.batch, "int32: tokens (B, T), then targets (B, T)", ""},
            {"--out", "", Option::String, &o.out, "fp32: loss, logits, gradients", ""},
            {"--rows", "-b", Option::Int, &o.B, "B", "1..65536"},
            {"--tokens", "-t", Option::Int, &o.T, "T", "1..4194304"},
            {"--device", "", Option::Choice, &o.device, "", "cpu|cuda"},
            {"--attention", "", Option::Choice, &o.attention, "on the CPU flash and naive are the same loops",
             attention_names()},
        };
        if (parse_options(argc, argv, table)) {
            std::printf("%s", options_help("dump_gradients", "Writes one batch's gradients.", table).c_str());
            return 0;
        }
        if (o.device == "cpu") {
            dump(Cpu(), o);
        } else {
            Cuda dev(0);
            dev.tf32 = false;
            dump(dev, o);
        }
        return 0;
    });
}
