#include "run/choices.h"

#include "run/checkpoint_files.h"

namespace {
constexpr int32_t kMagic = 20240522, kVersion = 1;
constexpr uint16_t kStart = 65535;
constexpr char kAgain[] = "make the file with data/hellaswag.py";
}  // namespace

std::vector<Choice> read_choices(const std::string& path, int vocab, int max_T) {
    const InputFile file(path);
    int32_t header[kHeaderInts];
    file.read(0, header, kHeaderBytes);
    if (header[0] != kMagic)
        refuse(path, "wrong magic at offset 0", kMagic, header[0], kAgain);
    if (header[1] != kVersion)
        refuse(path, "wrong version at offset 4", kVersion, header[1], kAgain);
    std::vector<uint16_t> stream((file.size - kHeaderBytes) / sizeof(uint16_t));
    file.read(kHeaderBytes, stream.data(), stream.size() * sizeof(uint16_t));

    size_t at = 0;
    const auto fail = [&](const std::string& what, const std::string& expected, auto found,
                          const char* advice = kAgain) {
        refuse(path, format("%s at offset %zu", what.c_str(), kHeaderBytes + at * sizeof(uint16_t)),
               expected, found, advice);
    };
    const auto next = [&](const char* what, int least, int most) {
        const std::string range = format("%d..%d", least, most);
        if (at >= stream.size())
            fail(what, range, "the file's end");
        if (stream[at] < least || stream[at] > most)
            fail(what, range, stream[at]);
        return stream[at++];
    };
    const auto tokens = [&](const char* what) {
        std::vector<int> list(next(what, 1, 65534));
        for (int& token : list)
            token = next("token", 0, vocab - 1);
        return list;
    };
    std::vector<Choice> choices;
    for (int i = 0; i < header[2]; i++) {
        Choice choice;
        next("start of an example", kStart, kStart);
        next("size of an example", 0, 65535);
        choice.index = next("index", 0, 65535);
        choice.label = next("label", 0, 65535);
        const int endings = next("number of endings", choice.label + 1, 64);
        choice.context = tokens("length of a context");
        for (int e = 0; e < endings; e++) {
            choice.endings.push_back(tokens("length of an ending"));
            const size_t length = choice.context.size() + choice.endings.back().size() - 1;
            if (length > static_cast<size_t>(max_T))
                fail("length of an example", format("at most T = %d tokens", max_T), length,
                     "give a larger -t");
        }
        choices.push_back(std::move(choice));
    }
    const size_t expected = kHeaderBytes + at * sizeof(uint16_t);
    if (file.size != expected)
        refuse(path, "too long", format("%zu bytes for %d examples", expected, header[2]),
               file.size, kAgain);
    if (choices.empty())
        throw Error(format("%s: no examples", path.c_str()));
    return choices;
}
