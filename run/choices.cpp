#include "run/choices.h"

#include "run/checkpoint_files.h"

namespace {

constexpr int32_t kMagic = 20240522;
constexpr int32_t kVersion = 1;
constexpr uint16_t kStart = 65535;
constexpr int kMostEndings = 64;
constexpr char kMakeAgain[] = "make the file again with data/hellaswag.py";

// Reads the examples behind the header, one number after another. Every read says which range it
// expects.
class QuestionReader {
  public:
    QuestionReader(const InputFile& file, int vocab, int max_T)
        : path_(file.path),
          vocab_(vocab),
          max_T_(max_T),
          stream_((file.size - kHeaderBytes) / sizeof(uint16_t)) {
        file.read(kHeaderBytes, stream_.data(), stream_.size() * sizeof(uint16_t));
    }

    Question next_question() {
        Question question;
        const size_t begin = offset();
        next("start of an example", kStart, kStart);
        next("size of an example", 0, 65535);
        question.index = next("index", 0, 65535);
        question.label = next("label", 0, 65535);
        const int endings = next("number of endings", question.label + 1, kMostEndings);
        question.context = next_tokens("length of a context");
        for (int e = 0; e < endings; e++) {
            question.endings.push_back(next_tokens("length of an ending"));
            // The last token is only predicted.
            const size_t length = question.context.size() + question.endings.back().size() - 1;
            if (length > static_cast<size_t>(max_T_))
                refuse(path_, format("length of the example at offset %zu", begin),
                       format("at most T = %d tokens", max_T_), length, "give a larger -t");
        }
        return question;
    }

    size_t offset() const { return kHeaderBytes + at_ * sizeof(uint16_t); }  // in the file

  private:
    template <class Found>
    [[noreturn]] void fail(const std::string& what, const std::string& expected,
                           Found found) const {
        refuse(path_, format("%s at offset %zu", what.c_str(), offset()), expected, found,
               kMakeAgain);
    }

    int next(const char* what, int least, int most) {
        const std::string range = format("%d..%d", least, most);
        if (at_ >= stream_.size())
            fail(what, range, "the file's end");
        const int value = stream_[at_];
        if (value < least || value > most)
            fail(what, range, value);
        at_++;
        return value;
    }

    // A count and that many tokens.
    std::vector<int> next_tokens(const char* what) {
        std::vector<int> tokens(next(what, 1, 65534));
        for (int& token : tokens)
            token = next("token", 0, vocab_ - 1);
        return tokens;
    }

    const std::string path_;
    const int vocab_;
    const int max_T_;
    std::vector<uint16_t> stream_;
    size_t at_ = 0;  // the next number
};

}  // namespace

std::vector<Question> read_questions(const std::string& path, int vocab, int max_T) {
    const InputFile file(path);
    int32_t header[kHeaderInts];
    file.read(0, header, kHeaderBytes);
    if (header[0] != kMagic)
        refuse(path, "wrong magic at offset 0", kMagic, header[0], kMakeAgain);
    if (header[1] != kVersion)
        refuse(path, "wrong version at offset 4", kVersion, header[1], kMakeAgain);
    const int examples = header[2];

    QuestionReader reader(file, vocab, max_T);
    std::vector<Question> questions;
    for (int i = 0; i < examples; i++)
        questions.push_back(reader.next_question());

    const size_t expected = reader.offset();
    if (file.size != expected)
        refuse(path, "too long", format("%zu bytes for %d examples", expected, examples), file.size,
               kMakeAgain);
    if (questions.empty())
        throw Error(format("%s: has no examples; %s", path.c_str(), kMakeAgain));
    return questions;
}
