// The table of all operations, compiled once for each instruction set.
#include "record.h"

namespace ISA {

extern const Family attention_family, blocks_family, elements_family, indexing_family, linear_family, reductions_family, rows_family;

extern const Family* const families[];
const Family* const families[] = {&attention_family, &blocks_family,     &elements_family, &indexing_family,
                                  &linear_family,    &reductions_family, &rows_family,     nullptr};

}  // namespace ISA
