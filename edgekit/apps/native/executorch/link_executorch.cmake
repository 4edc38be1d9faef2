# link_executorch(TARGET) links ExecuTorch, with the program and the operators of this folder, to a target.
#
# Against an installed package (a wheel, or a cross-built prefix):  -DCMAKE_PREFIX_PATH=…/executorch
# Inside a checkout of ExecuTorch, for phones:                      -DEXECUTORCH_SOURCE=…/executorch
set(EXECUTORCH_SOURCE "" CACHE PATH "A checkout of ExecuTorch to build with; empty: find_package")

function(link_executorch target)
  set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  target_sources(${target} PRIVATE ${folder}/program.cpp ${folder}/operators.cpp)
  set_source_files_properties(${folder}/program.cpp ${folder}/operators.cpp PROPERTIES COMPILE_OPTIONS
    "-Wno-unused-parameter;-Wno-deprecated-declarations")
  target_include_directories(${target} PRIVATE ${folder})
  if(EXECUTORCH_SOURCE)
    # As ExecuTorch's own pages say to; its preset `llm` builds the XNNPACK backend and the attention operators.
    set(EXECUTORCH_BUILD_PRESET_FILE ${EXECUTORCH_SOURCE}/tools/cmake/preset/llm.cmake)
    add_subdirectory(${EXECUTORCH_SOURCE} executorch EXCLUDE_FROM_ALL)
    file(STRINGS ${EXECUTORCH_SOURCE}/version.txt version LIMIT_COUNT 1)
    include(${EXECUTORCH_SOURCE}/tools/cmake/Utils.cmake)
    executorch_target_link_options_shared_lib(custom_ops)
    target_link_libraries(${target} PRIVATE executorch executorch::backends executorch::extensions
      executorch::kernels custom_ops extension_threadpool $<$<PLATFORM_ID:Android>:log>)
    target_compile_definitions(${target} PRIVATE ET_USE_THREADPOOL)
  else()
    find_package(executorch CONFIG REQUIRED)
    set(version ${EXECUTORCH_BUILD_VERSION})
    target_include_directories(${target} SYSTEM PRIVATE ${EXECUTORCH_INCLUDE_DIRS})
    # The thread pool and the quantised kernels stand beside what EXECUTORCH_LIBRARIES names.
    target_compile_definitions(${target} PRIVATE ${EXECUTORCH_COMPILE_DEFINITIONS} ET_USE_THREADPOOL)
    target_link_libraries(${target} PRIVATE ${EXECUTORCH_LIBRARIES} ${EXECUTORCH_QUANTIZED_KERNELS_LIBRARY})
    # Kernels and backends register themselves as they are loaded, and nothing else refers to them.
    target_link_options(${target} PRIVATE LINKER:--no-as-needed)
  endif()
  target_compile_definitions(${target} PRIVATE NATIVE_EXECUTORCH="${version}")
endfunction()
